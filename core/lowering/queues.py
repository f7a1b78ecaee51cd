"""The queues of a lowered plan: the compute queue of each device, the messages, and the tasks of other queues.

Validation, memory, the simulator and its trace all read this form of a plan. The dependencies of each action are found
here, once; kinds are known by their ``TaskKind`` only (``kinds.py``).

The order of sends and receives is decided in `lowering`. Here each send has the last compute item issued before it, and
each receive the next compute item after it::

    issued         1RECV_F0<0   1F0   1SEND_F0>2   1RECV_B0<2   1B0
    compute item                 0                                1
    message 0F0>1  posted=0, reader=0
    message 1F0>2                     issued=0
    message 2B0>1                                  posted=1, reader=1
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, permutations

from attrs import frozen

from ..actions import SEND_KINDS, Action, Kind
from ..costs.costs import COMPUTE_SECONDS
from ..errors import RequestError
from ..plan.items import Item, Message, Task
from ..plan.kinds import TaskKind, declarations, task_kinds
from ..plan.plan import Plan
from ..policies import end_of_step  # noqa: F401 - declares the kinds of all policies

Pair = tuple[int, int]
Posted = dict[Pair, list[tuple[Action, int]]]
"""Per ordered pair of devices the sends, or the receives, each with the number of compute items issued before it."""
Positions = dict[tuple[int, int | None], int]
"""Positions of F, or of B and I, by stage and microbatch."""


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


def computed_at(actions: Iterable[Action]) -> tuple[Positions, Positions]:
    """Positions of F, and of B or I: the actions that read messages and compute them."""
    forward: Positions = {}
    backward: Positions = {}
    for position, action in enumerate(actions):
        kind = action.kind
        if kind is Kind.F:
            forward[action.stage, action.microbatch] = position
        elif kind is Kind.B or kind is Kind.I:
            backward[action.stage, action.microbatch] = position
    return forward, backward


def sending_pairs(plan: Plan) -> tuple[Pair, ...]:
    """The ordered pairs of devices between which a step of a plan sends: activations, gradients, and tied weights.

    The devices with copies of a tied weight send each other their gradients.
    """
    where = plan.placement
    found = {(where[edge.src], where[edge.dst]) for edge in plan.edges}
    found |= {(where[edge.dst], where[edge.src]) for edge in plan.edges if edge.gradient_bytes > 0}
    for weight in plan.tied:
        found |= set(permutations({where[stage] for stage in weight.stages}, 2))
    return tuple(sorted((a, b) for a, b in found if a != b))


def queues_of(plan: Plan, lowered: Sequence[Sequence[Action]]) -> Queues:
    """Sort the actions that devices issue into queues.

    Args:
        lowered: per device its actions, from ``lower``, or written by hand with the same actions (`validate` compares
            them), of which sends and receives may be elsewhere.

    Raises:
        RequestError: the two ends of a queue differ in order; a message is sent before it is computed, or received
            after its reader.
    """
    sent: Posted = {}
    received: Posted = {}
    compute: list[tuple[Action, ...]] = []
    kinds, placement = task_kinds(), plan.placement
    items: dict[TaskKind, list[Item]] = {declaration: [] for declaration in declarations()}
    for device, actions in enumerate(lowered):
        ops: list[Action] = []
        for place, action in enumerate(actions):
            kind = action.kind
            if kind in COMPUTE_SECONDS:
                ops.append(action)
            elif action.peer is None:
                items[kinds[kind]].append(Item(device, kinds[kind].queue, action, len(ops), place))
            elif kind in SEND_KINDS:
                sent.setdefault((device, placement[action.peer]), []).append((action, len(ops) - 1))
            else:
                received.setdefault((placement[action.peer], device), []).append((action, len(ops)))
        compute.append(tuple(ops))
    ends = {device for pair in sent for device in pair}
    at = {device: computed_at(actions) for device, actions in enumerate(compute) if device in ends}
    messages = {pair: _messages(plan, pair, sends, received[pair], at) for pair, sends in sent.items()}
    tasks: list[Task] = []
    for declaration, found in items.items():
        tasks += declaration.tasks(plan, compute, found, tuple(tasks))
    return Queues(tuple(compute), messages, tuple(tasks))


def _messages(
    plan: Plan,
    pair: Pair,
    sent: Sequence[tuple[Action, int]],
    received: Sequence[tuple[Action, int]],
    at: Mapping[int, tuple[Positions, Positions]],
) -> list[Message]:
    """The messages from one device to another, in the order of both ends."""
    src, dst = pair
    sizes = {(edge.src, edge.dst): edge for edge in plan.edges}
    messages: list[Message] = []
    for (send, issued), (receive, posted) in zip(sent, received, strict=True):
        forward = send.kind is Kind.SEND_F
        stage, peer, microbatch = send.stage, send.peer, send.microbatch
        if (
            receive.stage != peer
            or receive.peer != stage
            or receive.microbatch != microbatch
            or (receive.kind is Kind.RECV_F) != forward
        ):
            raise RequestError(
                f"message {len(messages)} from device {src} to {dst} is {send} at the sender and {receive} at the "
                "receiver: both ends have one order; move the receive"
            )
        by_stage = 0 if forward else 1
        if at[src][by_stage][stage, microbatch] > issued:
            raise RequestError(
                f"{send} is before the action that computes its tensors: move it after {_compute_of(send)}"
            )
        reader = at[dst][by_stage][peer, microbatch]
        if reader < posted:
            raise RequestError(f"{receive} is after the action that reads it: move it before {_compute_of(receive)}")
        size = sizes[stage, peer].bytes if forward else sizes[peer, stage].gradient_bytes
        messages.append(Message(send, receive, src, dst, size, issued, posted, reader))
    return messages


def _compute_of(action: Action) -> str:
    kind = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "backward"
    return f"stage {action.stage}'s {kind} of microbatch {action.microbatch}"
