"""The time of a message as a linear function of its size: latency + bytes / rate."""

from collections.abc import Sequence

from attrs import frozen

from ...errors import RequestError


@frozen
class Point:
    """A measured message and its time on the fitted line."""

    bytes: int
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """Relative error of the line."""
        return abs(self.fitted_s - self.measured_s) / self.measured_s


@frozen
class LineFit:
    """A fitted line.

    Args:
        latency_s: the time of a message of 0 bytes.
        bytes_per_s: the inverse of the slope.
        points: the measurements that it was fitted to, with residuals.
    """

    latency_s: float
    bytes_per_s: float
    points: tuple[Point, ...]

    def seconds(self, size_bytes: float) -> float:
        """The time of a message."""
        return self.latency_s + size_bytes / self.bytes_per_s


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> LineFit:
    """The line with the least sum of squared relative errors; neither latency nor time per byte is below 0.

    Relative, because the times of small and large messages differ by three orders of magnitude, and a plan sends both.

    Args:
        sizes: of the messages, in bytes; at least two different ones.
        seconds: of each message, above 0.

    Raises:
        RequestError: there are not two sizes, or a time is not above 0.
    """
    import numpy
    from scipy.optimize import lsq_linear

    if len(set(sizes)) < 2 or min(seconds, default=0.0) <= 0:
        raise RequestError(
            f"messages of {sorted(set(sizes))} bytes took {list(seconds)} s: a line needs two sizes and times above 0"
        )
    times = numpy.array(seconds, dtype=float)
    largest, longest = max(sizes), float(times.max())
    rows = numpy.stack([longest / times, numpy.array(sizes) / largest * longest / times], axis=1)
    latency, slope = lsq_linear(rows, numpy.ones(len(times)), bounds=(0, numpy.inf), method="bvls").x
    latency_s, per_byte_s = float(latency) * longest, float(slope) * longest / largest
    # All sizes took equally long: the slope is 0, so the rate of the largest message is a lower bound.
    rate = 1 / per_byte_s if per_byte_s > 0 else largest / float(times[list(sizes).index(largest)])
    points = [Point(size, float(time), latency_s + size * per_byte_s) for size, time in zip(sizes, times, strict=True)]
    return LineFit(latency_s, rate, tuple(points))
