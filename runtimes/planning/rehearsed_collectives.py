"""Times of the collectives over replicas in rehearsed steps, in which devices compute and other ranks communicate."""

import statistics
from collections.abc import Mapping, Sequence

import numpy
from attrs import evolve

from ...core.actions import Kind
from ...core.costs.collective_times import CollectiveTimes
from ...core.costs.costs import StageCosts
from ...core.plan.plan import Plan
from ...core.plan.sharding import level_of
from ...core.trace.trace import COLLECTIVE_QUEUE, Trace

_FIELDS = {Kind.REDUCE_GRAD: "reduce_s", Kind.SCATTER_GRAD: "scatter_s", Kind.UNSHARD: "gather_s"}


def collective_seconds(traces: Sequence[Trace], quantile: float) -> dict[tuple[int, Kind], float]:
    """(Stage, kind) → seconds of a collective: its mean over a step's microbatches and replicas, a quantile over steps.

    A device's collectives run one after another: one that was issued while the one before it ran begins at its end.

    Args:
        traces: of rehearsed steps of one plan.
        quantile: of times over steps, between 0 and 1.
    """
    found: dict[tuple[int, Kind], list[float]] = {}
    for trace in traces:
        step: dict[tuple[int, Kind], list[float]] = {}
        free: dict[int, float] = {}
        own = [event for event in trace.events if event.queue == COLLECTIVE_QUEUE and event.action.kind in _FIELDS]
        for event in sorted(own, key=lambda each: (each.end_s, each.start_s)):
            start = max(event.start_s, free.get(event.device, 0.0))
            step.setdefault((event.action.stage, event.action.kind), []).append(max(event.end_s - start, 0.0))
            free[event.device] = event.end_s
        for key, times in step.items():
            found.setdefault(key, []).append(statistics.fmean(times))
    return {key: float(numpy.quantile(times, quantile)) for key, times in found.items()}


def with_collective_seconds(
    plan: Plan, costs: Sequence[StageCosts], seconds: Mapping[tuple[int, Kind], float]
) -> tuple[StageCosts, ...]:
    """Costs of a plan's stages with the times of their collectives.

    Args:
        plan: what its replicas share.
        costs: of its stages.
        seconds: of `collective_seconds`.
    """
    result = []
    for stage, cost in enumerate(costs):
        known = {field: seconds[stage, kind] for kind, field in _FIELDS.items() if (stage, kind) in seconds}
        times = CollectiveTimes(level_of(plan, stage), plan.mesh.data, **known) if known else None
        result.append(evolve(cost, collectives=times))
    return tuple(result)
