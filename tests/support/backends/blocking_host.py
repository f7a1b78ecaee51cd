"""A host that waits for the device at times that it does not choose, over the operations that it issues.

NCCL's rules: operations of a communicator run one after another, in the order of issue, and one that has started ends
when its counterpart has started, too. Each ordered pair of devices has a communicator. The model is independent of
validation and of the backends.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from panpipe.core.actions import COMM_KINDS, SEND_KINDS, Action, Kind
from panpipe.core.plan.plan import Plan


class Operation(NamedTuple):
    """Something that a host issues.

    Args:
        action: a compute action, a send or a receive.
        ready: number of compute actions of this device after which it may start on the device.
    """

    action: Action
    ready: int


Waits = Callable[[Operation], bool]
"""Whether the host waits, directly after it issued an operation, until the operation has ended."""


def waits_at_receives(operation: Operation) -> bool:
    return operation.action.kind in COMM_KINDS - SEND_KINDS


def waits_at_all_but_sends(operation: Operation) -> bool:
    return operation.action.kind not in SEND_KINDS


def as_lowered(plan: Plan, lowered: Sequence[Sequence[Action]]) -> list[list[Operation]]:
    """The operations of hosts that issue each action where it is lowered."""
    found = []
    for actions in lowered:
        computed, own = 0, []
        for action in actions:
            if action.microbatch is not None:
                own.append(Operation(action, computed))
                computed += action.kind not in COMM_KINDS
        found.append(own)
    return found


def stuck(
    plan: Plan,
    hosts: Sequence[Sequence[Operation]],
    waits: Waits = lambda _: False,
    whole_device: bool = False,
    one_channel: bool = False,
    tensor_ranks: int = 1,
    waiting: Collection[int] | None = None,
) -> list[Action]:
    """The compute actions that never run; empty if the step completes.

    Args:
        plan: its placement.
        hosts: per device the operations in the order of issue.
        waits: where hosts wait.
        whole_device: whether they wait there for everything that they have issued, also for their sends.
        one_channel: whether two devices have one communicator for both directions.
        tensor_ranks: number of pipelines that all run the plan, and all-reduce in each compute action: it ends when all
            of them have started it.
        waiting: numbers of those whose hosts wait; all by default.
    """
    hosts = [*hosts] * tensor_ranks
    model = _Model(plan.placement, hosts, waits, whole_device, one_channel, plan.devices, waiting)
    while any([*map(model.issue, range(len(hosts))), *map(model.compute, range(len(hosts))), model.transfer()]):
        pass
    return [one.action for device, own in enumerate(model.computes) for one in own[model.computed[device] :]]


class _Model:
    """The state of all hosts and devices; each method returns whether it made progress."""

    def __init__(
        self,
        place: Sequence[int],
        hosts: Sequence[Sequence[Operation]],
        waits: Waits,
        whole_device: bool,
        one_channel: bool,
        devices: int,
        waiting: Collection[int] | None,
    ) -> None:
        self.devices, self.waiting = devices, waiting
        self.place, self.hosts, self.waits, self.whole_device = place, hosts, waits, whole_device
        self.done: set[tuple[int, Action]] = set()
        self.computed, self.issued = [0] * len(hosts), [0] * len(hosts)
        self.computes = [[one for one in own if one.action.kind not in COMM_KINDS] for own in hosts]
        self.places = [{one.action: at for at, one in enumerate(own)} for own in hosts]
        self.channels: dict[tuple[int, tuple[int, ...]], list[Operation]] = {}
        for device, own in enumerate(hosts):
            for one in own:
                if one.action.kind in COMM_KINDS:
                    pair = _pair(place, one.action)
                    channel = device, tuple(sorted(pair)) if one_channel else pair
                    self.channels.setdefault(channel, []).append(one)

    def issue(self, device: int) -> bool:
        """Issue until the host waits."""
        before, own = self.issued[device], self.hosts[device]
        while self.issued[device] < len(own):
            at = self.issued[device]
            awaited = own[0 if self.whole_device else max(at - 1, 0) : at]
            waits = self.waiting is None or device // self.devices in self.waiting
            waits = waits and at > 0 and self.waits(own[at - 1])
            if waits and any((device, one.action) not in self.done for one in awaited):
                break
            self.issued[device] += 1
        return self.issued[device] > before

    def compute(self, device: int) -> bool:
        """Run compute actions in order, as far as they are issued and their messages are there, on all tensor ranks."""
        before, own = self.computed[device], self.computes[device]
        together = range(device % self.devices, len(self.hosts), self.devices)
        while self.computed[device] < len(own):
            action = own[self.computed[device]].action
            if not all(self.is_ready(each, action) for each in together):
                break
            for each in together:
                self.done.add((each, action))
                self.computed[each] += 1
        return self.computed[device] > before

    def is_ready(self, device: int, action: Action) -> bool:
        """Whether a device has issued a compute action and has its messages."""
        reads = _read(self.hosts[device], action)
        return self.is_issued(device, action) and all((device, each) in self.done for each in reads)

    def transfer(self) -> bool:
        """End the transfers of which both ends have started."""
        heads = {(device, own[0]) for (device, _), own in self.channels.items() if own}
        started = {
            (device, one.action)
            for device, one in heads
            if self.is_issued(device, one.action) and self.computed[device] >= one.ready
        }
        ended = {
            (d, action)
            for d, action in started
            if (d - d % self.devices + self.place[action.peer], action.counterpart) in started
        }
        self.done |= ended
        for (device, _), own in self.channels.items():
            if own and (device, own[0].action) in ended:
                own.pop(0)
        return bool(ended)

    def is_issued(self, device: int, action: Action) -> bool:
        return self.places[device][action] < self.issued[device]


def _pair(place: Sequence[int], action: Action) -> tuple[int, int]:
    here, there = place[action.stage], place[action.peer]
    return (here, there) if action.kind in SEND_KINDS else (there, here)


def _read(operations: Sequence[Operation], action: Action) -> list[Action]:
    """The receives that a compute action reads."""
    kind = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
    if action.kind is Kind.W:
        return []
    return [
        one.action for one in operations
        if one.action.kind is kind and (one.action.stage, one.action.microbatch) == (action.stage, action.microbatch)
    ]  # fmt: skip
