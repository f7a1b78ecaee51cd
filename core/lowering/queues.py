"""The queues of a lowered plan: the compute queue of each device, the messages, and the tasks of other queues.

Validation, memory, the simulator and its trace all read this form of a plan. The dependencies of each action are found
here, once; kinds are known by their ``TaskKind`` only (``kinds.py``).
"""

from collections.abc import Sequence
from itertools import groupby

from attrs import evolve, frozen

from ..actions import COMM_KINDS, SEND_KINDS, Action, Kind
from ..costs.costs import COMPUTE_SECONDS
from ..errors import RequestError
from ..plan.items import Item, Message, Task
from ..plan.kinds import TaskKind, declarations, task_kinds
from ..plan.plan import Plan
from ..policies import end_of_step  # noqa: F401 - declares the kinds of all policies
from .message_matching import Posted, match_messages, peer_device


@frozen
class Queues:
    """A lowered plan by queues.

    Args:
        compute: per device its compute queue: F, B, I, W, RECOMPUTE and STEP, in order.
        messages: the queue of every ordered pair of devices, in the order of both ends.
        tasks: all other work; tasks with the same ``order`` are listed in that order.
    """

    compute: tuple[tuple[Action, ...], ...]
    messages: dict[tuple[int, int], list[Message]]
    tasks: tuple[Task, ...] = ()

    def replicated(self, replicas: int) -> "Queues":
        """The queues of ``replicas`` equal pipelines; device d of replica r is number ``r × devices + d``.

        All replicas share the message objects of the first: their ``src`` and ``dst`` are positions along the pipeline.
        """
        if replicas == 1:
            return self
        count = len(self.compute)
        messages = {
            (first + src, first + dst): queue
            for first in range(0, replicas * count, count)
            for (src, dst), queue in self.messages.items()
        }
        return Queues(self.compute * replicas, messages, _replicated(self.tasks, replicas, count))

    def without(self, kind: Kind) -> "Queues":
        """The queues without the tasks of a kind; nothing waits for them any more."""
        kept = [at for at, task in enumerate(self.tasks) if task.kind is not kind]
        if len(kept) == len(self.tasks):
            return self
        numbers = {at: number for number, at in enumerate(kept)}

        def kept_waits(item: Item) -> Item:
            return item._replace(waits=tuple(numbers[at] for at in item.waits if at in numbers))

        tasks = (self.tasks[at] for at in kept)
        return evolve(self, tasks=tuple(task._replace(items=tuple(map(kept_waits, task.items))) for task in tasks))


def _replicated(tasks: Sequence[Task], replicas: int, count: int) -> tuple[Task, ...]:
    """Tasks of all replicas: one per replica, except for those that join all replicas."""
    result: list[Task] = []
    kinds = task_kinds()
    numbers: dict[tuple[int, int], int] = {}  # (replica, task of one replica) → position in the result
    together = range(replicas)

    def add(at: int, parts: Sequence[int]) -> None:
        task = tasks[at]
        numbers.update(((replica, at), len(result)) for replica in parts)
        items = tuple(
            item._replace(
                device=replica * count + item.device, waits=tuple(numbers[replica, other] for other in item.waits)
            )
            for replica in parts
            for item in task.items
        )
        readers = tuple((replica * count + device, at) for replica in parts for device, at in task.readers)
        order = task.order and (task.order[0], parts[0] * count + task.order[1])
        result.append(task._replace(items=items, readers=readers, order=order))

    for joined, run in groupby(range(len(tasks)), lambda at: kinds[tasks[at].kind].joins_replicas):
        found = list(run)
        for parts in (together,) if joined else ([replica] for replica in together):
            for at in found:
                add(at, parts)
    return tuple(result)


def queues_of(plan: Plan, lowered: Sequence[Sequence[Action]]) -> Queues:
    """Sort the actions that devices issue into queues.

    Args:
        plan: its placement and edges.
        lowered: per device its actions, from ``lower`` or written by hand; no property of ``lower`` is assumed.

    Raises:
        RequestError: an action is on the wrong device, messages do not match (``match_messages``), or tasks are
            misplaced (``TaskKind.tasks``).
    """
    sent: Posted = {}
    received: Posted = {}
    compute: list[tuple[Action, ...]] = []
    kinds = task_kinds()
    items: dict[TaskKind, list[Item]] = {declaration: [] for declaration in declarations()}
    for device, actions in enumerate(lowered):
        ops: list[Action] = []
        peers: dict[tuple[int, int | None], int] = {}
        for place, action in enumerate(actions):
            kind = action.kind
            if kind in COMPUTE_SECONDS:
                ops.append(action)
            elif kind in COMM_KINDS:
                stages = action.stage, action.peer
                if stages not in peers:
                    peers[stages] = peer_device(plan, device, action)
                if kind in SEND_KINDS:
                    sent.setdefault((device, peers[stages]), []).append((action, len(ops) - 1))
                else:
                    received.setdefault((peers[stages], device), []).append((action, len(ops)))
            elif kind in kinds:
                items[kinds[kind]].append(Item(device, kinds[kind].queue, action, len(ops), place))
            else:
                raise RequestError(f"device {device} issues {action}: this version cannot run it; remove it")
        compute.append(tuple(ops))
    messages = match_messages(plan, sent, received, compute)
    tasks: list[Task] = []
    for declaration, found in items.items():
        tasks += declaration.tasks(plan, compute, found, tuple(tasks))
    return Queues(tuple(compute), messages, tuple(tasks))
