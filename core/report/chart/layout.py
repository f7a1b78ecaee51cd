"""The layout of a schedule's picture: two charts, one above the other, with the same time axis."""

import math

from attrs import frozen

from ...schedules.scored import Scored

LEFT, RIGHT, TOP = 56.0, 72.0, 104.0
"""Pixels left of, right of and above the charts."""
LANE, PHASE, GAP = 24.0, 6.0, 9.0
"""Pixels: height of a device's actions, of the bar of its phases, and between devices."""
HELD = 30.0
"""Pixels: height of a device's memory."""
BETWEEN, MARGIN = 58.0, 16.0
"""Pixels between the two charts, and below them."""
NARROW, WIDE = 1080.0, 6000.0
"""Pixels: the least and the largest width of a chart."""
LABELLED = 12.0
"""Width in pixels of the shortest action, if the chart stays below its largest width."""
CHARACTER = 6.2
"""Pixels: width of a digit."""


@frozen
class Axis:
    """Converts times to pixels.

    Args:
        makespan: the time that the chart shows.
        width: width of the chart, in pixels.
    """

    makespan: float
    width: float

    def x(self, time: float) -> float:
        """Pixels from the chart's left edge to a time."""
        return self.width * time / self.makespan if self.makespan else 0.0

    def ticks(self) -> list[float]:
        """Round times, one in about every 90 pixels."""
        rough = 90 * self.makespan / self.width
        if rough <= 0:
            return [0.0]
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        return [step * number for number in range(int(self.makespan / step * (1 + 1e-9)) + 1)]


@frozen
class Layout:
    """Positions in pixels from the picture's top left corner.

    Args:
        axis: the time axis of both charts.
        devices: number of lanes of each chart.
    """

    axis: Axis
    devices: int

    @property
    def gantt(self) -> float:
        """Height of the upper chart."""
        return self.devices * (PHASE + LANE + GAP)

    @property
    def memory(self) -> float:
        """Height of the lower chart."""
        return self.devices * (HELD + GAP)

    @property
    def width(self) -> float:
        return LEFT + self.axis.width + RIGHT

    @property
    def height(self) -> float:
        return TOP + self.gantt + BETWEEN + self.memory

    def memory_top(self, device: int) -> float:
        """Upper edge of a device's memory lane."""
        return TOP + self.gantt + BETWEEN + device * (HELD + GAP)


def layout_of(scored: Scored) -> Layout:
    return Layout(axis_of(scored), scored.problem.devices)


def axis_of(scored: Scored) -> Axis:
    """A time axis so wide that the label of the shortest action with a duration fits, within bounds."""
    result = scored.result
    lengths = [
        end - start
        for starts, ends in zip(result.starts, result.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    ]
    if not lengths:
        return Axis(result.makespan, NARROW)
    return Axis(result.makespan, min(max(LABELLED * result.makespan / min(lengths), NARROW), WIDE))
