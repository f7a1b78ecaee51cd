"""Derives the plan of one step, with only the messages that its microbatches send, and lowers it.

1. A batch with fewer samples than the plan has microbatches runs the plan's first microbatches.
2. Microbatches of another shape may need other messages between stages. The plan of a step has every message that any
   of its microbatches sends. Lowered sends and receives that would move nothing are removed, on both ends: the order
   of the remaining actions is valid, because each waits for a subset of what it waited for before.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod

from attrs import frozen

from ...core.actions import COMPUTE_KINDS, WORK_KINDS, Action, Kind
from ...core.costs.costs import StageEdge
from ...core.lowering.derive import first_microbatches, reordered, with_edges
from ...core.lowering.lowering import Lowered, lower
from ...core.lowering.queues import queues_of
from ...core.plan.kinds import task_kinds
from ...core.plan.plan import Plan
from ...core.policies.replicas import collectives
from ...core.validation.validate import check_actions, check_resources
from ..programs.compiled import Layout

_COLLECTIVES = (Kind.SCATTER_GRAD, Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.RESHARD)
MessagePairs = frozenset[tuple[int, int, bool]]
"""(sending stage, reading stage, whether a gradient is sent back) of every message of a microbatch."""
Fences = Mapping[Action, Sequence[Action]]


def message_pairs(layout: Layout) -> MessagePairs:
    """The pairs of stages that exchange messages."""
    return frozenset((*pair, any(t.differentiable for t in tensors)) for pair, tensors in layout.items())


@frozen
class LoweredPlan:
    """A plan for some microbatches, and its lowered actions.

    Args:
        lowered: the lowered actions of each device, without those that move nothing for these microbatches.
        fences: per device, compute action → the actions of its other queues that it waits for.
    """

    plan: Plan
    lowered: Lowered
    fences: Sequence[Fences]


def find_fences(plan: Plan, lowered: Lowered) -> Sequence[Fences]:
    """Per device, compute action → the actions of its other queues that it waits for.

    Args:
        lowered: all of its actions, also those that move nothing.
    """
    found: list[dict[Action, tuple[Action, ...]]] = [{} for _ in lowered]
    if not any(action.kind in task_kinds() for actions in lowered for action in actions):
        return found
    queues = queues_of(plan, lowered)
    for task in queues.tasks:
        own = {item.device: item.action for item in task.items}
        for device, position in task.readers:
            if device in own:
                reader = queues.compute[device][position]
                found[device][reader] = (*found[device].get(reader, ()), own[device])
    return found


def lowered_plan(plan: Plan, layouts: Sequence[Layout]) -> LoweredPlan:
    """Derive the plan for these microbatches, and lower it.

    Args:
        plan: a valid plan; microbatches beyond the given ones are removed.
        layouts: for each microbatch the tensors of every message.

    Raises:
        RequestError: the order of the plan's actions is not valid with these messages.
    """
    wanted = with_edges(first_microbatches(plan, len(layouts)), _edges(layouts))
    if wanted.forward_only and wanted is not plan:
        wanted = reordered(wanted)
    lowered = lower(wanted)
    if plan.mesh.data > 1 and wanted.microbatches < plan.microbatches:
        lowered = _reduced_in_order(lowered, plan)
    if wanted is not plan:
        check_resources(check_actions(wanted, lowered, placed=True))
    pairs = [message_pairs(layout) for layout in layouts]
    moving = tuple(tuple(a for a in actions if _moves_something(a, pairs)) for actions in lowered)
    return LoweredPlan(wanted, moving, find_fences(wanted, lowered))


def _reduced_in_order(lowered: Lowered, plan: Plan) -> Lowered:
    """Insert the sums and gathers over replicas of the whole plan: after the same compute actions, without those that
    are missing.

    Another replica may have more microbatches in this step. All replicas take part in the same sums in one order, and
    where each waits for others as in the whole plan, no wait is circular.
    """
    found = []
    for device, actions in enumerate(lowered):
        compute = plan.device_actions[device]
        known = {action for action in actions if action.kind in COMPUTE_KINDS}
        before = [0, *accumulate(action in known for action in compute)]
        sums = deque((before[position + 1], action) for position, action in collectives(plan, device))
        own: list[Action] = []
        done = 0
        for action in actions:
            at_end = action.microbatch is None
            if action.kind in _COLLECTIVES and not (at_end and action.kind is Kind.UNSHARD):
                continue
            if at_end or action.kind in WORK_KINDS:
                while sums and (sums[0][0] <= done or at_end):
                    own.append(sums.popleft()[1])
                done += action.kind in COMPUTE_KINDS
            own.append(action)
        found.append((*own, *(action for _, action in sums)))
    return tuple(found)


def _edges(layouts: Sequence[Layout]) -> list[StageEdge]:
    """The messages of all microbatches, each with the bytes of its largest; at least one byte, also for a gradient."""
    edges: dict[tuple[int, int], StageEdge] = {}
    for layout in {id(layout): layout for layout in layouts}.values():
        for pair, tensors in layout.items():
            known = edges.get(pair, StageEdge(*pair, 1, 0))
            sizes = [(prod(t.shape) * t.dtype.itemsize, t.differentiable) for t in tensors]
            back = max(1, sum(size for size, gradient in sizes if gradient)) if any(g for _, g in sizes) else 0
            edges[pair] = StageEdge(
                *pair, max(known.bytes, sum(size for size, _ in sizes)), max(known.gradient_bytes, back)
            )
    return list(edges.values())


def _moves_something(action: Action, pairs: Sequence[MessagePairs]) -> bool:
    if action.peer is None or action.microbatch is None:
        return True
    ends = (action.stage, action.peer) if action.kind in (Kind.SEND_F, Kind.RECV_B) else (action.peer, action.stage)
    back = action.kind in (Kind.SEND_B, Kind.RECV_B)
    sent = pairs[action.microbatch]
    return (*ends, True) in sent or (not back and (*ends, False) in sent)
