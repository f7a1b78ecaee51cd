"""The times of a simulated step: of its operations, messages and tasks."""

from collections.abc import Mapping

from attrs import field, frozen

from ..core.actions import Action
from .network.flow_times import Direction, FlowTimes


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
