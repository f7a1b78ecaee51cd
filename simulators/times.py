"""Times of a simulated step: flows, queues, tasks."""

from collections.abc import Mapping
from typing import NamedTuple

from attrs import field, frozen

from ..core.actions import Action
from ..core.plan.queues import Queues

Direction = tuple[str, str]
"""A link in one direction: names of the devices or hubs at its start and end."""


class Piece(NamedTuple):
    """A part of a flow's time in which its rate did not change.

    Args:
        start_s, end_s: when.
        rate: bytes/s over each path of the flow.
        held_by: the full link that limits its rate; None without contention.
    """

    start_s: float
    end_s: float
    rate: float
    held_by: Direction | None


class FlowTimes(NamedTuple):
    """Bytes that drained through links.

    Args:
        links: the links crossed; each is listed as often as it was crossed.
        bytes: over each path.
        bytes_per_s: rate without contention.
        start_s, drained_s: when the first and the last byte left.
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
        """Time from start to end without contention."""
        return self.bytes / self.bytes_per_s

    @property
    def all_pieces(self) -> tuple[Piece, ...]:
        """Its rate from start to end."""
        if self.pieces is not None:
            return self.pieces
        return (Piece(self.start_s, self.drained_s, self.bytes_per_s, None),)


@frozen
class TaskTimes:
    """An item of a task other than compute: a reduction, a SYNC.

    Args:
        device, queue, action: of the item.
        issued_s, end_s: when it was issued with all its conditions met, and when it ended, in seconds.
        start_s: when all members had joined.
        bytes: of the device's own part.
        contention: by full link, the delay of its end because others shared the link.
    """

    device: int
    queue: str
    action: Action
    issued_s: float
    end_s: float
    start_s: float = 0.0
    bytes: float = 0.0
    contention: Mapping[Direction, float] = field(factory=dict)


@frozen
class QueueTimes:
    """The messages from one device to another.

    Args:
        flows: in order.
        ready_s: when each was sent and its receive was posted.
        starts, arrivals: when each started, and when it had arrived.
    """

    flows: list[FlowTimes]
    ready_s: list[float]
    starts: list[float]
    arrivals: list[float]


@frozen
class StepTimes:
    """All times of one step, in seconds.

    Args:
        queues: of the lowered plan with all its replicas.
        operations: per device the starts and the ends of its operations.
        transfers: per ordered pair of devices the starts and the arrivals of its messages.
        tasks: the items of tasks, device by device in the order issued.
        step_s: until the last device has finished.
    """

    queues: Queues
    operations: tuple[tuple[list[float], list[float]], ...]
    transfers: Mapping[tuple[int, int], tuple[list[float], list[float]]]
    tasks: tuple[TaskTimes, ...]
    step_s: float
