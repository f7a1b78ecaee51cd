"""The kinds that sum gradients over the replicas of a stage: SCATTER_GRAD of a microbatch, and REDUCE_GRAD of a step.

::

    compute            0B6 ─┬────────── 0B7 ─┬────────────┬─ STEP
    SCATTER_GRAD            └─▶ [ 0, 6 ] ─▲   └▶ [ 0, 7 ]  │     of a stage whose replicas share gradients: a
    REDUCE_GRAD                               └─▶ ...... [ ]     reduce-scatter; the stage's next backward waits for it

All of a device's are on one queue, in the order issued. REDUCE_GRAD of a stage whose replicas share gradients has
nothing left to sum: the replicas agree which parameters have a gradient, after the last SCATTER_GRAD.
"""

from collections.abc import Iterator, Sequence
from operator import itemgetter

from ..actions import LAST_BACKWARD, Action, Kind
from ..errors import RequestError
from ..trace.trace import COLLECTIVE_QUEUE
from .items import Item, Task
from .kinds import Compute, TaskKind, declare
from .memory import CHANGES
from .plan import Plan
from .sharding import shards_gradients
from .unsharding import after_steps, check_unsharding, reader_of, runs_of

_NEEDS_GRADIENTS = "needs its gradients"
_NEEDS_BUFFERS = "needs the memory of its gradients"
_NEEDS_PARAMETERS = "needs its parameters"
_PARAMETERS = (Kind.UNSHARD, Kind.RESHARD)


def collectives(plan: Plan, device: int) -> list[tuple[int, Action]]:
    """The collectives of a device over replicas within a step, each with the position that it follows in the compute
    order: SCATTER_GRAD, REDUCE_GRAD, UNSHARD and RESHARD, in the order issued."""
    if plan.mesh.data == 1 or plan.forward_only:
        return runs_of(plan, device)
    actions = plan.device_actions[device]
    last = {action.stage: position for position, action in enumerate(actions) if action.kind in LAST_BACKWARD}
    scattered = {stage for stage in last if shards_gradients(plan, stage)}
    found = []
    for position, action in enumerate(actions):
        if action.kind in LAST_BACKWARD and action.stage in scattered:
            found.append((position, Action(action.stage, Kind.SCATTER_GRAD, action.microbatch)))
        if last.get(action.stage) == position:
            found.append((position, Action(action.stage, Kind.REDUCE_GRAD)))
    if plan.memory.unshard:  # at one position sums are issued first
        found = sorted([*found, *runs_of(plan, device)], key=itemgetter(0))
    return found


def _insert(plan: Plan, device: int) -> Iterator[tuple[int, Action]]:
    yield from collectives(plan, device)
    yield from after_steps(plan, device)


def _tasks(plan: Plan, compute: Compute, items: Sequence[Item], _: Sequence[Task]) -> Iterator[Task]:
    """With replicas every stage has one REDUCE_GRAD, between its last backward and its STEP; a stage whose replicas
    share gradients has a SCATTER_GRAD for each microbatch before that, between its backward and REDUCE_GRAD."""
    by_device: list[list[Item]] = [[] for _ in compute]
    for item in items:
        by_device[item.device].append(item)
    for device, (actions, own) in enumerate(zip(compute, by_device, strict=True)):
        reduced = [item for item in own if item.action.kind is Kind.REDUCE_GRAD]
        _check_reductions(plan, device, actions, reduced)
        _check_scatters(plan, device, actions, own)
        check_unsharding(plan, device, actions, [item for item in own if item.action.kind in _PARAMETERS])
        steps = {action.stage: at for at, action in enumerate(actions) if action.kind is Kind.STEP}
        for item in own:
            action, order = item.action, (COLLECTIVE_QUEUE, device)
            if action.kind is Kind.SCATTER_GRAD:
                reader, reason = _next_backward(actions, item), _NEEDS_BUFFERS
            elif action.kind in _PARAMETERS:
                reader, reason = reader_of(actions, item), _NEEDS_PARAMETERS
            else:
                reader, reason = steps.get(action.stage), _NEEDS_GRADIENTS
            readers = () if reader is None else ((device, reader),)
            yield Task(action.kind, str(action), reason, (item,), readers, order)


def _next_backward(actions: Sequence[Action], item: Item) -> int | None:
    """The position of the next action of an item's stage that computes gradients of parameters."""
    later = range(item.issued, len(actions))
    stage = item.action.stage
    return next((at for at in later if actions[at].stage == stage and actions[at].kind in LAST_BACKWARD), None)


def _check_reductions(plan: Plan, device: int, actions: Sequence[Action], reduced: Sequence[Item]) -> None:
    stages = [item.action.stage for item in reduced]
    held = [stage.index for stage in plan.stages_on(device)]
    if stages and (plan.mesh.data == 1 or plan.forward_only):
        why = "is forward only" if plan.forward_only else "has one replica"
        raise RequestError(
            f"device {device} issues {stages[0]}REDUCE_GRAD and the plan {why}: there is nothing to reduce; remove it"
        )
    if plan.mesh.data > 1 and not plan.forward_only and sorted(stages) != sorted(held):
        raise RequestError(
            f"device {device} issues REDUCE_GRAD of stages {stages} and holds {held}: over replicas each stage reduces "
            "once"
        )
    for item in reduced:
        stage = item.action.stage
        early = next((a for a in actions[item.issued :] if a.stage == stage and a.kind is not Kind.STEP), None)
        late = next((a for a in actions[: item.issued] if a.stage == stage and a.kind is Kind.STEP), None)
        if early is not None or late is not None:
            raise RequestError(
                f"{stage}REDUCE_GRAD is before {early}: move it after that"
                if early is not None
                else f"{stage}REDUCE_GRAD is after {late}: move it before that"
            )


def _check_scatters(plan: Plan, device: int, actions: Sequence[Action], own: Sequence[Item]) -> None:
    """Check the SCATTER_GRAD of a device. Microbatches that the plan does not have are those of other replicas."""
    scatters = [item for item in own if item.action.kind is Kind.SCATTER_GRAD]
    sharing = [stage.index for stage in plan.stages_on(device) if shards_gradients(plan, stage.index)]
    if not scatters and not sharing:
        return
    ends = {(a.stage, a.microbatch): at for at, a in enumerate(actions) if a.kind in LAST_BACKWARD}
    done: set[tuple[int, int | None]] = set()
    reduced = {item.action.stage: item.place for item in own if item.action.kind is Kind.REDUCE_GRAD}
    for item in scatters:
        action, key = item.action, (item.action.stage, item.action.microbatch)
        if action.stage not in sharing or key in done:
            raise RequestError(
                f"device {device} issues {action} and the replicas of stage {action.stage} share no gradients, or it "
                "has one already: remove it"
            )
        done.add(key)
        if ends.get(key, -1) >= item.issued:
            raise RequestError(f"{action} is before {actions[ends[key]]}, whose gradients it sums: move it after that")
        if item.place > reduced.get(action.stage, item.place):
            raise RequestError(f"{action} is after {action.stage}REDUCE_GRAD, which ends it: move it before that")
    missing = next((key for key in ends if key[0] in sharing and key not in done), None)
    if missing is not None:
        raise RequestError(
            f"device {device} issues no {Action(missing[0], Kind.SCATTER_GRAD, missing[1])}, and the replicas of stage "
            f"{missing[0]} share gradients: add it"
        )


declare(
    TaskKind(
        (Kind.SCATTER_GRAD, Kind.REDUCE_GRAD, *_PARAMETERS),
        COLLECTIVE_QUEUE,
        _insert,
        _tasks,
        changes={kind: CHANGES[kind] for kind in _PARAMETERS},
        joins_replicas=True,
    )
)
