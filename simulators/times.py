"""When everything in a simulated step happened."""

from collections.abc import Mapping

from attrs import frozen

from ..core.actions import Kind
from ..core.messages import Exchange


@frozen
class ReductionTimes:
    """One REDUCE_TIED or REDUCE_GRAD.

    Args:
        device, stage: whose.
        issued_s, end_s: when the device issued it, and when the sums were there, in seconds.
        kind: which of the two.
        start_s: when all who take part were there.
        bytes: of the device's own gradients.
    """

    device: int
    stage: int
    issued_s: float
    end_s: float
    kind: Kind = Kind.REDUCE_TIED
    start_s: float = 0.0
    bytes: float = 0.0


@frozen
class StepTimes:
    """All times of one step, in seconds.

    Args:
        exchange: the plan, lowered and taken apart.
        operations: per device the starts and the ends of its operations.
        transfers: per ordered pair of devices the starts and the arrivals of its messages.
        reductions: of tied weights, and of gradients over replicas.
        step_s: until the last device is done.
    """

    exchange: Exchange
    operations: tuple[tuple[list[float], list[float]], ...]
    transfers: Mapping[tuple[int, int], tuple[list[float], list[float]]]
    reductions: tuple[ReductionTimes, ...]
    step_s: float
