"""Searches in which the replicas of a stage share its optimizer, or its gradients, too (``policies/sharding.py``).

A sharded setting has the costs of one replica, and the times of what its replicas sum and gather; its plans have levels
and the costs of whole stages. ``auto`` shares nothing where that fits. Else it takes the faster of the levels, and in
its plan each stage shares no more than it has to.
"""

from collections.abc import Callable, Sequence

from attrs import evolve

from ..cluster.mesh import least_by_position
from ..errors import RequestError
from ..plan.plan import Plan
from ..policies.sharding import AUTO, LEVELS, NONE, level_and_sharers, part_of
from .confirm import SearchResult
from .problem.meter import Meter
from .problem.oracle import Oracle, with_costs
from .problem.setting import Setting
from .suggestions.infeasible import NothingFits
from .unsharded_runs import with_runs

Search = Callable[[Sequence[Setting], Meter], SearchResult]
"""Searches some settings."""


def sharded_search(
    settings: Sequence[Setting], meter: Meter, shard: str, oracle: Oracle, search: Search
) -> SearchResult:
    """Search with this level of sharding.

    Args:
        settings: with the costs of whole stages.
        shard: a level for all stages, as `level_and_sharers` reads it, or ``auto``.
        oracle: predicts plans of which only some stages are sharded.

    Raises:
        RequestError: a level is asked for, and all meshes have one replica.
        NothingFits: no plan found fits in memory.
    """
    level, sharing = level_and_sharers(shard, AUTO)
    if level == NONE:
        return search(settings, meter)
    replicated = [setting for setting in settings if len(setting.replicas) > 1]
    if level != AUTO:
        of_groups = [setting for setting in replicated if len(setting.replicas) % (sharing or 1) == 0]
        if replicated and not of_groups:
            raise RequestError(
                f"shard is '{shard}' and no mesh has a multiple of {sharing} replicas: give one, or another number"
            )
        if not replicated:
            raise RequestError(
                f"shard is '{shard}' and the mesh has one replica: replicas share; give a mesh with dp above 1, or "
                "leave shard out"
            )
        return search([setting.sharded(level, sharing) for setting in of_groups], meter)
    try:
        return search(settings, meter)
    except NothingFits:
        if not replicated or meter.exhausted:
            raise
    found = _levels_that_fit(settings, replicated, meter, oracle, search)
    fastest = min(found, key=lambda result: result.best.predicted.step_s)  # of equal ones that which shares less
    return evolve(fastest, evaluations=sum(result.evaluations for result in found))


def _levels_that_fit(
    settings: Sequence[Setting], replicated: Sequence[Setting], meter: Meter, oracle: Oracle, search: Search
) -> list[SearchResult]:
    """The results of the levels that share something; arguments as in `sharded_search`.

    A level that shares more may be faster: with the memory that it frees, fewer stages recompute.

    Raises:
        NothingFits: at no level a plan fits.
    """
    found: list[SearchResult] = []
    for level in LEVELS[1:]:
        part = meter.part(meter.budget, until_fit=meter.until_fit)
        try:
            result = search([setting.sharded(level) for setting in replicated], part)
        except NothingFits:
            if level == LEVELS[-1] and not found:
                raise
        else:
            plans = tuple(_where_needed(plan, settings[0].memory, oracle) for plan in result.plans)
            found.append(evolve(result, plans=plans))
            if meter.until_fit or result.stopped:
                break
        finally:
            meter.spent += part.spent
    return found


def _where_needed(plan: Plan, memory: Sequence[float], oracle: Oracle) -> Plan:
    """The plan in which each stage shares no more than its device needs; stages that need least are tried first.

    As many as possible share optimizers alone, because sums of each microbatch's gradients cost most; then as many as
    possible of these share nothing.

    Args:
        plan: all stages have one level; with a prediction.
        memory: bytes that each of the cluster's devices may hold.
    """
    prediction = plan.predicted
    limits = least_by_position(memory, plan.mesh.replicas)
    spare = [limit - peak for limit, peak in zip(limits, prediction.peak_memory_bytes, strict=True)]
    levels = list(plan.shard)
    for level in reversed(LEVELS[: LEVELS.index(levels[0])]):
        _lower(plan, levels, level, spare)
    if tuple(levels) == plan.shard or all(level == NONE for level in levels):
        return plan
    changed = with_runs(evolve(plan, shard=tuple(levels)), prediction.costs, prediction.cluster, limits)
    changed = with_costs(changed, prediction.costs, oracle)
    fits = all(peak <= limit for peak, limit in zip(changed.predicted.peak_memory_bytes, limits, strict=True))
    return changed if fits else plan


def _lower(plan: Plan, levels: list[str], level: str, spare: list[float]) -> None:
    """Set stages of the level above this one to this one, where memory is left.

    Args:
        levels: of each stage; changed.
        level: the lower level.
        spare: bytes that are left on each device; changed.
    """
    above, data = LEVELS[LEVELS.index(level) + 1], plan.mesh.data
    costs = plan.predicted.costs
    more = [part_of(cost, data, level).state_bytes - part_of(cost, data, above).state_bytes for cost in costs]
    for group in sorted(_groups(plan), key=lambda group: (sum(more[stage] for stage in group), group)):
        needs = [0.0] * plan.devices
        for stage in group:
            needs[plan.placement[stage]] += more[stage]
        if levels[group[0]] == above and all(need <= left for need, left in zip(needs, spare, strict=True)):
            spare[:] = [left - need for need, left in zip(needs, spare, strict=True)]
            for stage in group:
                levels[stage] = level


def _groups(plan: Plan) -> list[tuple[int, ...]]:
    """The stages, those that share tied weights together: they have one level."""
    group = {stage.index: stage.index for stage in plan.stages}
    for weight in plan.tied:
        joined = {group[stage] for stage in weight.stages}
        group = {stage: min(joined) if own in joined else own for stage, own in group.items()}
    return [tuple(s for s, own in group.items() if own == first) for first in sorted(set(group.values()))]
