"""A device whose actions call a function at their simulated times (see ``core/trace/callback.py``)."""

from collections.abc import Iterable, Sequence
from functools import partial

from simpy import Environment

from ..core.actions import Action
from ..core.plan.items import Message
from ..core.trace.callback import ActionCallback, CallMoment
from .channels import Channel
from .device import DeviceQueue


class CallbackQueue(DeviceQueue):
    """A device's compute queue that calls back for its operations.

    Args:
        seconds: duration of every operation.
        operations: the actions.
    """

    __slots__ = ("device", "operations", "perform")

    def __init__(
        self,
        environment: Environment,
        seconds: Sequence[float],
        device: int,
        operations: Sequence[Action],
        perform: ActionCallback,
    ) -> None:
        super().__init__(environment, seconds)
        self.device, self.operations, self.perform = device, operations, perform

    def _start(self) -> None:
        self.perform(CallMoment.START, self.device, self.operations[self.position], self.environment.now)
        super()._start()

    def finish(self) -> None:
        """The operation has ended: call back for it."""
        self.perform(CallMoment.END, self.device, self.operations[self.position], self.environment.now)
        super().finish()

    def issue(self, actions: Sequence[Action]) -> None:
        """The device issues the actions between two operations."""
        for action in actions:
            self.perform(CallMoment.ISSUE, self.device, action, self.environment.now)

    def receive(self, message: Message) -> None:
        """A message has arrived."""
        self.perform(CallMoment.ARRIVAL, self.device, message.receive, self.environment.now)


def connect_callbacks(
    queues: Sequence[CallbackQueue], lowered: Sequence[Sequence[Action]], channels: Iterable[Channel]
) -> None:
    """Call back for sends, receives and other issued actions, too.

    Args:
        queues: of all devices; replicas one after another.
    """
    for queue in queues:
        _issue_in_order(queue, lowered[queue.device % len(lowered)])
    by_identity = {id(queue): queue for queue in queues}
    for channel in channels:
        channel.on_arrival = by_identity[id(channel.receiver)].receive


def _issue_in_order(queue: CallbackQueue, lowered: Sequence[Action]) -> None:
    """Call back for the actions between two operations, in the lowered order and before the simulation issues them."""
    position, between = 0, list[Action]()
    for action in lowered:
        if position < len(queue.operations) and action == queue.operations[position]:
            queue.between[position].insert(0, partial(queue.issue, tuple(between)))
            position, between = position + 1, []
        else:
            between.append(action)
    queue.between[position].insert(0, partial(queue.issue, tuple(between)))
