"""The time of a message as a linear function of its size: latency + bytes / rate."""

from collections.abc import Sequence

import numpy as np
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

    Errors are relative, because the times of small and large messages differ by three orders of magnitude, and a plan
    sends both.

    Args:
        sizes: sizes of the messages, in bytes; at least two different ones.
        seconds: time of each message, above 0.

    Raises:
        RequestError: there are not two sizes, or a time is not above 0.
    """
    if len(set(sizes)) < 2 or min(seconds, default=0.0) <= 0:
        raise RequestError(
            f"messages of {sorted(set(sizes))} bytes took {list(seconds)} s: a line needs two sizes and times above 0"
        )
    times = np.array(seconds, dtype=float)
    largest, longest = max(sizes), float(times.max())
    rows = np.stack([longest / times, np.array(sizes) / largest * longest / times], axis=1)
    latency, slope = _nonnegative(rows)
    latency_s, per_byte_s = latency * longest, slope * longest / largest
    # All sizes took equally long: the slope is 0, so the rate of the largest message is a lower bound.
    rate = 1 / per_byte_s if per_byte_s > 0 else largest / float(times[list(sizes).index(largest)])
    points = [Point(size, float(time), latency_s + size * per_byte_s) for size, time in zip(sizes, times, strict=True)]
    return LineFit(latency_s, rate, tuple(points))


def _nonnegative(rows: np.ndarray) -> tuple[float, float]:
    """The two coefficients, neither below 0, whose combination of the columns is nearest to 1 in all rows.

    For two columns the problem has three candidates: both free, or one of them 0. It is written here because the import
    of ``scipy.optimize`` takes longer than all measurements that lines are fitted to.
    """
    target = np.ones(len(rows))
    both = np.linalg.lstsq(rows, target, rcond=None)[0]
    if min(both) >= 0:
        return float(both[0]), float(both[1])
    # The columns and the target are above 0, so each column alone has a coefficient above 0.
    alone = rows.sum(axis=0) / (rows**2).sum(axis=0)
    errors = ((rows * alone - 1) ** 2).sum(axis=0)
    return (float(alone[0]), 0.0) if errors[0] <= errors[1] else (0.0, float(alone[1]))
