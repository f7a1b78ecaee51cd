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

from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter

from ..actions import AT_START, LAST_BACKWARD, WORK_KINDS, Action, Kind
from ..cluster.cluster import Cluster
from ..cluster.collectives import Operation, collective_phases
from ..costs.costs import Compute, StageCosts
from ..plan.items import Item, Task
from ..plan.kinds import AFTER_STEP, Movement, TaskKind, declare
from ..plan.memory import CHANGES
from ..plan.plan import Plan
from ..trace.trace import COLLECTIVE_QUEUE
from .sharding import shards, shards_gradients, shards_parameters, unsharded_bytes

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


def _tasks(_: Plan, compute: Compute, items: Sequence[Item], __: Sequence[Task]) -> Iterator[Task]:
    """A task for each item, in the order issued, and the compute item that waits for it."""
    steps = [{action.stage: at for at, action in enumerate(own) if action.kind is Kind.STEP} for own in compute]
    for item in items:
        device, action = item.device, item.action
        if action.kind is Kind.SCATTER_GRAD:
            reader, reason = _next(compute[device], item, LAST_BACKWARD), _NEEDS_BUFFERS
        elif action.kind is Kind.REDUCE_GRAD:
            reader, reason = steps[device].get(action.stage), _NEEDS_GRADIENTS
        else:
            gathers = action.kind is Kind.UNSHARD and action.microbatch is not None
            reader, reason = _next(compute[device], item, WORK_KINDS) if gathers else None, _NEEDS_PARAMETERS
        readers = () if reader is None else ((device, reader),)
        yield Task(action.kind, reason, (item,), readers, (COLLECTIVE_QUEUE, device))


def _next(actions: Sequence[Action], item: Item, kinds: Collection[Kind]) -> int | None:
    """The position of the next action of an item's stage that is of one of these kinds."""
    stage = item.action.stage
    later = range(item.issued, len(actions))
    return next((at for at in later if actions[at].stage == stage and actions[at].kind in kinds), None)


def _reduced(plan: Plan, costs: Sequence[StageCosts], stage: int) -> tuple[int, Operation]:
    """Bytes of the gradients that a stage's REDUCE_GRAD sums, and how; none where SCATTER_GRAD has summed them."""
    if shards_gradients(plan, stage):
        return 0, Operation.ALL_REDUCE
    return costs[stage].gradient_bytes, Operation.REDUCE_SCATTER if shards(plan, stage) else Operation.ALL_REDUCE


def over_replicas(kind: Kind, stage: int, plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> Movement:
    """The collective of a kind over the replicas of a stage, by the algorithm that is fastest without other traffic, in
    one bucket.

    Args:
        kind: REDUCE_GRAD, SCATTER_GRAD or UNSHARD.
        costs: per stage, of whole stages.
        cluster: its devices in the order of ranks (``Mesh.arrange``).
    """
    if kind is Kind.REDUCE_GRAD:
        size, operation = _reduced(plan, costs, stage)
    elif kind is Kind.SCATTER_GRAD:
        size, operation = costs[stage].gradient_bytes, Operation.REDUCE_SCATTER
    else:
        size, operation = unsharded_bytes(plan, costs, stage), Operation.ALL_GATHER
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
