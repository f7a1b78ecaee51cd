"""Rehearsing a plan: a few steps that change nothing, to learn what its stages cost while they run as planned.

Stages that run beside each other, with messages between them and saved tensors piling up, take longer than each alone:
they share memory bandwidth and caches. A rehearsal is the profile that a prediction for this machine should stand on.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from ..core.actions import Kind
from ..core.costs import StageCosts
from ..core.plan import Plan
from ..core.trace import Trace

STEPS = 3
"""Rehearsed steps, after one that does not count."""


def rehearsed_costs(plan: Plan, costs: Sequence[StageCosts], traces: Sequence[Trace]) -> tuple[StageCosts, ...]:
    """Stage costs with times taken from traces of the plan itself: medians over microbatches and steps.

    Args:
        plan: the plan that was run.
        costs: what was known of its stages; everything that no trace tells stays.
        traces: of steps that ran as planned.
    """
    series: dict[tuple[int, Kind], list[float]] = {}
    for trace in traces:
        for event in trace.events:
            series.setdefault((event.action.stage, event.action.kind), []).append(event.end_s - event.start_s)

    def median(stage: int, kind: Kind, known: float) -> float:
        return statistics.median(series.get((stage, kind), [known]))

    return tuple(
        evolve(
            cost,
            forward_s=median(stage.index, Kind.F, cost.forward_s),
            backward_s=median(stage.index, Kind.B, cost.full_backward_s),
            backward_input_s=median(stage.index, Kind.I, cost.backward_input_s),
            backward_weight_s=median(stage.index, Kind.W, cost.backward_weight_s),
        )
        for stage, cost in zip(plan.stages, costs, strict=True)
    )


def rehearse(plan: Plan, run: Callable[[], Trace]) -> tuple[StageCosts, ...]:
    """Run a plan a few times and return what its stages cost.

    Args:
        plan: with a prediction.
        run: runs one step that changes nothing, and returns its trace.
    """
    assert plan.prediction is not None
    traces: list[Any] = [run() for _ in range(1 + STEPS)]
    return rehearsed_costs(plan, plan.prediction.costs, traces[1:])
