"""The kinds at the end of a step: sums of tied weights, and SYNC of all stages.

The sums over replicas before them, and the UNSHARD of parameters after STEP, are in `replicas`.

::

    compute           ... 1B7 │ 0B6 │ 0B7 ──┬───────────────┬────── STEP ─┐
    REDUCE_GRAD            └─▶ [ stage 1 ]──┼─▶ [ stage 0 ]─┤         over a stage's replicas, in one order
    REDUCE_TIED                                             ├─▶ [ ]   over the stages that hold a weight
    SYNC                                                    └─▶ [ ]   over all devices, after all reductions
    UNSHARD                                                               └─▶ [ ]   over a stage's replicas
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations

from ..actions import Action, Kind
from ..cluster.cluster import Cluster
from ..cluster.collectives import Phase
from ..cluster.routing import path_latency_s
from ..costs.costs import Compute, StageCosts
from ..plan.items import Item, Task
from ..plan.kinds import Movement, TaskKind, declare
from ..plan.plan import Plan
from ..trace.trace import COMPUTE_QUEUE
from . import offload, replicas  # noqa: F401 - their kinds are declared, and inserted, first

_NUMBER_BYTES = 8


def optimizer_steps(plan: Plan, device: int) -> list[Action]:
    """The STEP of every stage of a device, in order: after all its compute, none if the plan is forward only."""
    return [] if plan.forward_only else [Action(stage.index, Kind.STEP) for stage in plan.stages_on(device)]


def _steps(compute: Compute) -> dict[int, tuple[int, int]]:
    """Stage → device and position of its STEP."""
    return {
        action.stage: (device, position)
        for device, actions in enumerate(compute)
        for position, action in enumerate(actions)
        if action.kind is Kind.STEP
    }


# Reduction of tied weights


def _insert_tied(plan: Plan, device: int) -> Iterator[tuple[None, Action]]:
    """Every reduction of a tied weight is before every STEP: two stages of one device may share a weight."""
    tied = {stage for weight in plan.tied for stage in weight.stages}
    for stage in plan.stages_on(device) if tied and not plan.forward_only else ():
        if stage.index in tied:
            yield None, Action(stage.index, Kind.REDUCE_TIED)


def _tied_tasks(plan: Plan, compute: Compute, items: Sequence[Item], known: Sequence[Task]) -> Iterator[Task]:
    """One task per weight, over its stages; a stage's gradients are reduced over replicas first."""
    if not plan.tied:
        return
    by_stage = {item.action.stage: item for item in items}
    steps = _steps(compute)
    summed = {task.items[0].action.stage: at for at, task in enumerate(known) if task.kind is Kind.REDUCE_GRAD}
    for weight in plan.tied:
        joins = tuple(
            by_stage[stage]._replace(waits=(summed[stage],)) if stage in summed else by_stage[stage]
            for stage in weight.stages
        )
        readers = tuple(steps[stage] for stage in weight.stages)
        yield Task(Kind.REDUCE_TIED, "sums a tied weight with it", joins, readers, weight=weight)


# SYNC of all stages


def _insert_sync(plan: Plan, device: int) -> Iterator[tuple[None, Action]]:
    """The device's SYNC has the number of its first stage and follows all reductions: it needs complete gradients."""
    if plan.sync and not plan.forward_only:
        for stage in plan.stages_on(device)[:1]:
            yield None, Action(stage.index, Kind.SYNC)


def _sync_tasks(_: Plan, compute: Compute, items: Sequence[Item], known: Sequence[Task]) -> Iterator[Task]:
    """The SYNC of the devices that ``items`` names, between all reductions and their STEPs."""
    reductions = [(at, task) for at, task in enumerate(known) if task.kind in (Kind.REDUCE_GRAD, Kind.REDUCE_TIED)]
    joins, readers = [], []
    for item in items:
        waits = [at for at, task in reductions if any(each.device == item.device for each in task.items)]
        joins.append(item._replace(waits=tuple(waits)))
        steps = (at for at, action in enumerate(compute[item.device]) if action.kind is Kind.STEP)
        readers += [(item.device, at) for at in (next(steps, None),) if at is not None]
    if joins:
        yield Task(Kind.SYNC, "agrees with all stages", tuple(joins), tuple(readers))


def _tied_moves(task: Task, _: Plan, __: Sequence[StageCosts], cluster: Cluster) -> Movement:
    """Each device with a copy sends its gradients to each other one."""
    assert task.weight is not None
    size, copies = task.weight.bytes, Counter(item.device for item in task.items)
    paths = [(copies[src], cluster.path(src, dst)) for src, dst in permutations(copies, 2)]
    flows = [Phase(count * size, path_latency_s(path), path) for count, path in paths]
    return Movement([flows] if flows else (), size)


def sync_bytes(plan: Plan) -> int:
    """Bytes of the table that stages exchange before they step: overflows, loss scales, and a norm of each gradient.

    They are float64. Each gradient's norm is exchanged separately, once for a tied weight, so that the global norm is
    summed in the model's order under every plan. A plan does not record whether gradients are clipped or only the loss
    is scaled, nor which parameters are trained: the real table lacks the norms of frozen parameters. Stages without
    parameter names have a table without norms.
    """
    names = {name for stage in plan.stages for name in stage.parameters}
    return _NUMBER_BYTES * (2 + len(names))


def _sync_moves(_: Task, plan: Plan, __: Sequence[StageCosts], cluster: Cluster) -> Movement:
    """To one device and back, each way as long as the slowest transfer between two of them."""
    size = sync_bytes(plan)
    ranks = [rank for rank in range(plan.mesh.ranks) if plan.stages_on(rank % plan.devices)]
    ways = (cluster.transfer_s(a, b, size) for a in ranks for b in ranks if a != b)
    return Movement(bytes=size, seconds=2 * max(ways, default=0.0))


declare(TaskKind((Kind.REDUCE_TIED,), COMPUTE_QUEUE, _insert_tied, _tied_tasks, _tied_moves))
declare(TaskKind((Kind.SYNC,), COMPUTE_QUEUE, _insert_sync, _sync_tasks, _sync_moves, joins_replicas=True))
