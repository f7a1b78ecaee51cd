"""What replicas of a stage sum and gather.

SCATTER_GRAD sums the gradients of a microbatch, and REDUCE_GRAD those of a step:

::

    compute            0B6 ─┬────────── 0B7 ─┬────────────┬─ STEP
    SCATTER_GRAD            └─▶ [ 0, 6 ] ─▲   └▶ [ 0, 7 ]  │     of a stage whose replicas share gradients: a
    REDUCE_GRAD                               └─▶ ...... [ ]     reduce-scatter; the stage's next backward waits for it

All of a device's are on one queue, in the order issued. REDUCE_GRAD of a stage whose replicas share gradients has
nothing left to sum: the replicas agree which parameters have a gradient, after the last SCATTER_GRAD.

UNSHARD gathers the parameters that the replicas of a stage share, and RESHARD frees them:

::

    compute              0F0 ─ 0F1 ─┬─ 1F0 ─ 1F1 ─ 1B0 ─┬─ 1B1 ─ 0B0 ─ 0B1 ─ ...  STEP ─┐
    UNSHARD     [0, run 0]          │                   └─▶ [0, run 1]                   └▶ [1]
    RESHARD                         └─ 0, run 0

1. Where replicas share parameters, the memory policy names the runs. Both are numbered by the run. The
   first compute action of a run waits for its UNSHARD.
2. Where replicas share the optimizer, or gradients, too, each holds the parameters whole: an UNSHARD without a number
   follows the STEP, and nothing waits for it.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from operator import itemgetter

from ..actions import AT_START, LAST_BACKWARD, WORK_KINDS, Action, Kind
from ..cluster.cluster import Cluster
from ..cluster.collectives import Operation, collective_phases
from ..costs.costs import CollectiveTimes, Compute, StageCosts
from ..errors import RequestError
from ..plan.items import Item, Task
from ..plan.kinds import AFTER_STEP, Movement, TaskKind, declare
from ..plan.memory import CHANGES
from ..plan.plan import Plan
from ..trace.trace import COLLECTIVE_QUEUE
from .sharding import level_of, shards, shards_gradients, shards_parameters, unsharded_bytes

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
        steps = {action.stage: at for at, action in enumerate(actions if own else ()) if action.kind is Kind.STEP}
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


def _measured(plan: Plan, costs: Sequence[StageCosts], stage: int) -> CollectiveTimes:
    """The measured times of a stage's collectives, where its replicas share the same in the plan."""
    found, level = costs[stage].collectives, level_of(plan, stage)
    fits = found is not None and (found.shard, found.replicas) == (level, plan.mesh.data)
    return found if found is not None and fits else CollectiveTimes(level, plan.mesh.data)


def _reduced(plan: Plan, costs: Sequence[StageCosts], stage: int) -> tuple[int, Operation]:
    """Bytes of the gradients that a stage's REDUCE_GRAD sums, and how; none where SCATTER_GRAD has summed them."""
    if shards_gradients(plan, stage):
        return 0, Operation.ALL_REDUCE
    return costs[stage].gradient_bytes, Operation.REDUCE_SCATTER if shards(plan, stage) else Operation.ALL_REDUCE


def over_replicas(kind: Kind, stage: int, plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> Movement:
    """The collective of a kind over the replicas of a stage: as measured, or by the algorithm that is fastest without
    other traffic, in one bucket.

    Args:
        kind: REDUCE_GRAD, SCATTER_GRAD or UNSHARD.
        stage: the stage.
        plan: its mesh, placement and levels.
        costs: per stage, of whole stages.
        cluster: its devices in the order of ranks (``Mesh.arrange``).
    """
    times = _measured(plan, costs, stage)
    if kind is Kind.REDUCE_GRAD:
        (size, operation), known_s = _reduced(plan, costs, stage), times.reduce_s
    elif kind is Kind.SCATTER_GRAD:
        size, operation, known_s = costs[stage].gradient_bytes, Operation.REDUCE_SCATTER, times.scatter_s
    else:
        size, operation, known_s = unsharded_bytes(plan, costs, stage), Operation.ALL_GATHER, times.gather_s
    if known_s is not None:  # it includes the waits for shared links
        return Movement(bytes=size, seconds=known_s)
    ranks = range(plan.placement[stage], plan.mesh.ranks, plan.devices)
    return Movement(
        [[phase] for phase in collective_phases(cluster, ranks, size, operation, sharers=plan.mesh.sharing)], size
    )


def _moves(task: Task, plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> Movement:
    """RESHARD frees memory, and moves nothing."""
    if task.kind is Kind.RESHARD:
        return Movement()
    return over_replicas(task.kind, task.items[0].action.stage, plan, costs, cluster)


declare(
    TaskKind(
        (Kind.SCATTER_GRAD, Kind.REDUCE_GRAD, *_PARAMETERS),
        COLLECTIVE_QUEUE,
        _insert,
        _tasks,
        _moves,
        {kind: CHANGES[kind] for kind in _PARAMETERS},
        joins_replicas=True,
    )
)


def runs_of(plan: Plan, device: int) -> list[tuple[int, Action]]:
    """The UNSHARD and RESHARD of a device within a step, each with the position that it follows, in order."""
    own = [each for each in plan.memory.unshard if plan.placement[each.stage] == device]
    at = {action: position for position, action in enumerate(plan.device_actions[device] if own else ())}
    found = []
    for each in own:
        for number, run in enumerate(each.runs):
            issued = AT_START if run.after is None else at[run.after]
            freed = issued if run.last is None else at[run.last]
            first = freed if run.first is None else at[run.first]
            found.append((issued, 1, first, Action(each.stage, Kind.UNSHARD, number)))
            found.append((freed, 2 if run.last is None else 0, first, Action(each.stage, Kind.RESHARD, number)))
    # At one position memory is freed first; what is read first is gathered first.
    found.sort(key=lambda each: (*each[:3], each[3].stage))
    return [(position, action) for position, _, _, action in found]


def after_steps(plan: Plan, device: int) -> Iterator[tuple[int, Action]]:
    """UNSHARD of the stages whose replicas hold whole parameters of which each steps a part, after their STEP."""
    for stage in plan.stages_on(device):
        if shards(plan, stage.index) and not shards_parameters(plan, stage.index):
            yield AFTER_STEP, Action(stage.index, Kind.UNSHARD)


def whole_at_once(plan: Plan) -> bool:
    """Whether each device has the parameters of all its stages whole at some time of a step."""
    for device in range(plan.devices):
        sharing = {stage.index for stage in plan.stages_on(device) if shards_parameters(plan, stage.index)}
        held, most = set[int](), 0
        for _, action in runs_of(plan, device):
            held = held | {action.stage} if action.kind is Kind.UNSHARD else held - {action.stage}
            most = max(most, len(held))
        if most < len(sharing):
            return False
    return True


def reader_of(compute: Sequence[Action], item: Item) -> int | None:
    """The position of the first compute item that waits for an UNSHARD; None if none does."""
    if item.action.kind is Kind.RESHARD or item.action.microbatch is None:
        return None
    stage = item.action.stage
    later = range(item.issued, len(compute))
    return next((at for at in later if compute[at].stage == stage and compute[at].kind in WORK_KINDS), None)


def check_unsharding(plan: Plan, device: int, compute: Sequence[Action], own: Sequence[Item]) -> None:
    """Check the UNSHARD and RESHARD that a device issues.

    Args:
        plan: the plan.
        device: its number along the pipeline.
        compute: its compute queue.
        own: its items of these kinds, in the order issued.

    Raises:
        RequestError: one is missing or misplaced, or an action computes while the parameters are not whole.
    """
    within = [item for item in own if item.action.microbatch is not None]
    _check_after_steps(plan, device, compute, [item for item in own if item.action.microbatch is None])
    wanted = {
        stage.index: _runs(plan, stage.index)
        for stage in plan.stages_on(device)
        if shards_parameters(plan, stage.index)
    }
    if not within and not wanted:
        return
    due = {
        stage: deque(Action(stage, kind, number) for number in range(count) for kind in (Kind.UNSHARD, Kind.RESHARD))
        for stage, count in wanted.items()
    }
    whole: dict[int, list[int]] = {stage: [] for stage in wanted}  # where the parameters begin and cease to be whole
    for item in within:
        expected = due.get(item.action.stage)
        if not expected or item.action != expected[0]:
            raise RequestError(
                f"device {device} issues {item.action} where the plan has {expected[0] if expected else 'none'}: each "
                "run of a stage whose replicas share parameters has one UNSHARD, and then one RESHARD; move it"
            )
        expected.popleft()
        whole[item.action.stage].append(item.issued)
    for stage, places in whole.items():
        if due[stage]:
            raise RequestError(f"device {device} issues no {due[stage][0]}, which the plan has: add it")
        for at, action in enumerate(compute):
            if action.stage == stage and action.kind in WORK_KINDS and bisect_right(places, at) % 2 == 0:
                raise RequestError(
                    f"device {device} issues {action} where the parameters of stage {stage} are not whole: move it "
                    "between an UNSHARD and its RESHARD"
                )


def _runs(plan: Plan, stage: int) -> int:
    return next((len(each.runs) for each in plan.memory.unshard if each.stage == stage), 0)


def _check_after_steps(plan: Plan, device: int, compute: Sequence[Action], items: Sequence[Item]) -> None:
    """Every stage whose replicas hold whole parameters of which each steps a part has one UNSHARD after its STEP."""
    wanted = {action.stage for _, action in after_steps(plan, device)}
    steps = {each.stage: at for at, each in enumerate(compute if items else ()) if each.kind is Kind.STEP}
    for item in items:
        stage = item.action.stage
        where = f"device {item.device} issues {item.action}"
        if stage not in wanted:
            raise RequestError(f"{where} and stage {stage} is not sharded, or has one already: remove it")
        wanted.remove(stage)
        if item.issued <= steps.get(stage, -1):
            raise RequestError(f"{where} before {stage}STEP, which computes what it gathers: move it after that")
    if wanted:
        raise RequestError(f"stage {min(wanted)} is sharded and no device issues {min(wanted)}UNSHARD: add it")
