"""When everything in a simulated step happened."""

from collections.abc import Mapping
from typing import NamedTuple

from attrs import field, frozen

from ..core.actions import Kind
from ..core.plan.messages import Exchange

Direction = tuple[str, str]
"""A link in one direction: names of the devices or hubs that it leads from and to."""


class Piece(NamedTuple):
    """A part of a flow's time in which its rate did not change.

    Args:
        start_s, end_s: when.
        rate: bytes/s over each path of the flow.
        held_by: the full link that holds it below the rate that it would have alone; None where none does.
    """

    start_s: float
    end_s: float
    rate: float
    held_by: Direction | None


class FlowTimes(NamedTuple):
    """Bytes that drained through links.

    Args:
        links: that it crossed; one stands as often as it was crossed.
        bytes: over each path.
        bytes_per_s: rate while nothing else is on the way.
        start_s, drained_s: when the first byte left, and the last.
        pieces: from start to end; None is one piece at ``bytes_per_s``.
    """

    links: tuple[Direction, ...]
    bytes: float
    bytes_per_s: float
    start_s: float
    drained_s: float
    pieces: tuple[Piece, ...] | None = None

    @property
    def alone_s(self) -> float:
        """Time from start to end while nothing else is on the way."""
        return self.bytes / self.bytes_per_s

    @property
    def all_pieces(self) -> tuple[Piece, ...]:
        """What its rate was, from start to end."""
        if self.pieces is not None:
            return self.pieces
        return (Piece(self.start_s, self.drained_s, self.bytes_per_s, None),)


@frozen
class ReductionTimes:
    """One REDUCE_TIED or REDUCE_GRAD, or a SYNC.

    Args:
        device, stage: whose.
        issued_s, end_s: when the device issued it, and when the sums were there, in seconds.
        kind: which of them.
        start_s: when all who take part were there.
        bytes: of the device's own gradients.
        contention: by full link, how much later the sums were there because others shared it.
    """

    device: int
    stage: int
    issued_s: float
    end_s: float
    kind: Kind = Kind.REDUCE_TIED
    start_s: float = 0.0
    bytes: float = 0.0
    contention: Mapping[Direction, float] = field(factory=dict)


@frozen
class QueueTimes:
    """The messages from one device to another.

    Args:
        flows: in order.
        ready_s: when each was sent and its receive was posted.
        starts, arrivals: when each left, and when all of it was there.
    """

    flows: list[FlowTimes]
    ready_s: list[float]
    starts: list[float]
    arrivals: list[float]


@frozen
class StepTimes:
    """All times of one step, in seconds.

    Args:
        exchange: the plan, lowered and taken apart.
        operations: per device the starts and the ends of its operations.
        transfers: per ordered pair of devices the starts and the arrivals of its messages.
        reductions: of tied weights, and of gradients over replicas; the SYNC of every device, where there is one.
        step_s: until the last device is done.
    """

    exchange: Exchange
    operations: tuple[tuple[list[float], list[float]], ...]
    transfers: Mapping[tuple[int, int], tuple[list[float], list[float]]]
    reductions: tuple[ReductionTimes, ...]
    step_s: float
