"""Having the actions of a simulated step performed while its clock runs (see ``core/trace/perform.py``)."""

from collections.abc import Iterable, Sequence
from functools import partial

from simpy import Environment, Event

from ..core.actions import Action
from ..core.plan.items import Message
from ..core.trace.perform import Moment, Perform
from .channels import Channel
from .device import DeviceQueue


class PerformingQueue(DeviceQueue):
    """A device's compute queue that has its operations performed.

    Args:
        environment: SimPy's.
        seconds: duration of every operation.
        device: its number.
        operations: what they are.
        perform: performs them.
    """

    __slots__ = ("device", "operations", "perform")

    def __init__(
        self,
        environment: Environment,
        seconds: Sequence[float],
        device: int,
        operations: Sequence[Action],
        perform: Perform,
    ) -> None:
        super().__init__(environment, seconds)
        self.device, self.operations, self.perform = device, operations, perform

    def _start(self) -> None:
        self.perform(Moment.START, self.device, self.operations[self.position], self.environment.now)
        super()._start()

    def _end(self, event: Event) -> None:
        self.perform(Moment.END, self.device, self.operations[self.position], self.environment.now)
        super()._end(event)

    def issue(self, actions: Sequence[Action]) -> None:
        """The device issues what stands between two operations."""
        for action in actions:
            self.perform(Moment.ISSUE, self.device, action, self.environment.now)

    def receive(self, message: Message) -> None:
        """A message has arrived."""
        self.perform(Moment.ARRIVAL, self.device, message.receive, self.environment.now)


def have_performed(
    queues: Sequence[PerformingQueue], lowered: Sequence[Sequence[Action]], channels: Iterable[Channel]
) -> None:
    """Have what devices issue and receive performed, too.

    Args:
        queues: of all devices; replicas one after the other.
        lowered: what the devices of one replica issue, in order.
        channels: between them.
    """
    for queue in queues:
        _issue_in_order(queue, lowered[queue.device % len(lowered)])
    by_identity = {id(queue): queue for queue in queues}
    for channel in channels:
        channel.on_arrival = by_identity[id(channel.receiver)].receive


def _issue_in_order(queue: PerformingQueue, lowered: Sequence[Action]) -> None:
    """What stands between two operations, in the lowered order and before the simulation moves any of it."""
    position, between = 0, list[Action]()
    for action in lowered:
        if position < len(queue.operations) and action == queue.operations[position]:
            queue.between[position].insert(0, partial(queue.issue, tuple(between)))
            position, between = position + 1, []
        else:
            between.append(action)
    queue.between[position].insert(0, partial(queue.issue, tuple(between)))
