"""When everything in a simulated step happened."""

from collections.abc import Mapping

from attrs import frozen

from ..core.messages import Exchange


@frozen
class ReductionTimes:
    """One REDUCE_TIED: its device, its stage, when it was issued and when the sums were there. Seconds."""

    device: int
    stage: int
    issued_s: float
    end_s: float


@frozen
class StepTimes:
    """All times of one step, in seconds.

    Args:
        exchange: the plan, lowered and taken apart.
        operations: per device the starts and the ends of its operations.
        transfers: per ordered pair of devices the starts and the arrivals of its messages.
        reductions: of tied weights.
        step_s: until the last device is done.
    """

    exchange: Exchange
    operations: tuple[tuple[list[float], list[float]], ...]
    transfers: Mapping[tuple[int, int], tuple[list[float], list[float]]]
    reductions: tuple[ReductionTimes, ...]
    step_s: float
