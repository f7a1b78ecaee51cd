"""The times of a simulated step: of its operations, messages and tasks."""

from attrs import frozen

from ..core.actions import Action
from .network.flow_times import FlowTimes


@frozen
class TaskTimes:
    """An item of a task other than compute: a reduction, a SYNC.

    Args:
        device, queue, action: of the item.
        issued_s, end_s: when it was issued with all its conditions met, and when it ended, in seconds.
        start_s: when all members had joined.
        bytes: of the device's own part.
    """

    device: int
    queue: str
    action: Action
    issued_s: float
    end_s: float
    start_s: float = 0.0
    bytes: float = 0.0


@frozen
class QueueTimes:
    """The messages from one device to another.

    Args:
        flows: in order.
        starts, arrivals: when each started, and when it had arrived.
    """

    flows: list[FlowTimes]
    starts: list[float]
    arrivals: list[float]
