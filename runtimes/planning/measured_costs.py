"""Costs of stages from the measured actions of training steps.

The time of a program is its mean over the microbatches of a step, because a step is a sum, in the step in which it is
the shortest. The time of a program that did not run changes by the same factor as the rest of its stage's backward.
"""

import statistics
from collections.abc import Mapping, Sequence

from attrs import evolve

from ...core.actions import Kind
from ...core.costs.costs import StageCosts
from ...core.costs.message_overhead import MessageTimes, typical, with_message_times
from ...core.plan.plan import Plan
from ...core.plan.sharding import shards
from ...core.trace.trace import Trace

MeasuredStep = tuple[Trace, MessageTimes]
"""A step of all devices, and the times that its messages took the devices at their ends."""


def measured_costs(plan: Plan, costs: Sequence[StageCosts], steps: Sequence[MeasuredStep]) -> tuple[StageCosts, ...]:
    """Stage costs with the times of measured steps, and with those of their messages.

    Args:
        plan: the plan that ran.
        costs: its known costs. Those that no step shows are kept.
        steps: at least one.
    """
    found: dict[tuple[int, Kind], float] = {}
    for trace, _ in steps:
        step: dict[tuple[int, Kind], list[float]] = {}
        for event in trace.events:
            step.setdefault((event.action.stage, event.action.kind), []).append(event.end_s - event.start_s)
        for program, times in step.items():
            found[program] = min(found.get(program, float("inf")), statistics.fmean(times))
    again = plan.memory.recompute
    own = [_updated(cost, i, found, i in again) for i, cost in enumerate(costs)]
    updated = with_message_times(own, plan.placement, plan.edges, typical([messages for _, messages in steps], 0.0))
    # Replicas that share an optimizer step a part of it each; the cost is of the whole.
    return tuple(
        evolve(cost, optimizer_s=found[i, Kind.STEP] * (plan.mesh.data if shards(plan, i) else 1))
        if (i, Kind.STEP) in found else cost
        for i, cost in enumerate(updated)
    )  # fmt: skip


def _updated(cost: StageCosts, stage: int, found: Mapping[tuple[int, Kind], float], again: bool) -> StageCosts:
    known = {Kind.B: cost.full_backward_s, Kind.I: cost.backward_input_s, Kind.W: cost.backward_weight_s}
    seen = [kind for kind in known if (stage, kind) in found]
    before = sum(known[kind] for kind in seen)
    scale = sum(found[stage, kind] for kind in seen) / before if before > 0 else 1.0
    times = {kind: found.get((stage, kind), known[kind] * scale) for kind in known}
    return evolve(
        cost,
        forward_s=found.get((stage, Kind.F), cost.forward_s),
        backward_s=times[Kind.B],
        backward_input_s=times[Kind.I],
        backward_weight_s=times[Kind.W],
        recompute_s=found.get((stage, Kind.RECOMPUTE), cost.second_forward_s) if again else cost.recompute_s,
    )
