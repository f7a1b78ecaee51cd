"""Costs of stages and messages from rehearsed steps, for every schedule of the same stages.

The time of a program is its mean over the microbatches of a step, because a step is a sum, and a quantile over steps.
The time of a program that was not rehearsed changes by the same factor as the rest of its stage's backward.
"""

import statistics
from collections.abc import Mapping, Sequence

import numpy
from attrs import evolve, frozen

from ...core.actions import Kind
from ...core.costs.costs import StageCosts
from ...core.costs.message_overhead import MessageTimes, typical, with_message_times
from ...core.paired_difference import robust_geometric_mean
from ...core.plan.plan import Plan
from ...core.plan.sharding import shards
from ...core.search import Oracle
from ...core.search.problem.blocks import Stages
from ...core.trace.trace import Trace


@frozen
class Rehearsal:
    """One rehearsed step.

    Args:
        trace: of all devices.
        messages: the time that messages cost the devices at their ends.
        whole_s: seconds of the whole call on the rank of the first device. In addition to the work of the devices it
            has cutting the batch, comparing it between ranks and collecting the loss. None if it is unknown.
        reference_s: seconds of the reference workload: the mean of before and after the step.
        updated: the step after it, in which stand-ins of the optimizers step; None if there was none.
    """

    trace: Trace
    messages: MessageTimes
    whole_s: float | None = None
    reference_s: float = 1.0
    updated: "Rehearsal | None" = None

    @property
    def step_s(self) -> float:
        """Seconds of the step, without optimizer steps: of the whole call, if known."""
        return self.trace.step_s if self.whole_s is None else self.whole_s


@frozen
class RehearsedProfile:
    """Costs of rehearsed stages.

    Args:
        costs: operators of all stages → the costs of each stage, of its programs alone.
        messages: the time that a message costs the devices at its ends.
    """

    costs: Mapping[Stages, tuple[StageCosts, ...]]
    messages: MessageTimes

    def of(self, plan: Plan) -> tuple[StageCosts, ...]:
        """Costs of a plan's stages with those of its messages, for any schedule and placement."""
        return with_message_times(self.costs[_stages(plan)], plan.placement, plan.edges, self.messages)


def rehearsed_profile(
    rehearsed: Sequence[tuple[Plan, Sequence[StageCosts], Sequence[Rehearsal]]], quantile: float
) -> RehearsedProfile:
    """The profile from rehearsals of several plans with different stages.

    Args:
        rehearsed: for each plan the plan, its known costs, and its rehearsed steps. Costs that no step shows are kept.
        quantile: of times over steps, between 0 and 1.
    """
    costs = {_stages(plan): rehearsed_costs(plan, known, [s.trace for s in seen], quantile)
             for plan, known, seen in rehearsed}  # fmt: skip
    return RehearsedProfile(costs, typical([one.messages for _, _, seen in rehearsed for one in seen], quantile))


def length_ratio(
    plan: Plan, costs: Sequence[StageCosts], steps_s: Sequence[float], oracle: Oracle, updated: bool = False
) -> float:
    """The time of rehearsed steps ÷ the time predicted from the times of their programs.

    Program times vary between microbatches, and when one device waits for another the longer one counts. So a step
    takes longer than one in which all programs take their mean times.

    Args:
        plan: the rehearsed plan.
        costs: costs of its stages from the rehearsal, with their messages.
        steps_s: seconds of the rehearsed steps; the typical one of them counts.
        oracle: predicts a step.
        updated: whether these steps have optimizer steps.
    """
    assert plan.prediction is not None
    ran = tuple(cost if updated else evolve(cost, optimizer_s=0.0) for cost in costs)
    predicted = oracle(evolve(plan, prediction=None, sync=plan.sync and updated), ran, plan.prediction.cluster).step_s
    return robust_geometric_mean(steps_s) / predicted if predicted > 0 else 1.0


def with_optimizer_seconds(
    plan: Plan, costs: Sequence[StageCosts], traces: Sequence[Trace], quantile: float
) -> tuple[StageCosts, ...]:
    """Costs with the times of the optimizers of whole stages, from steps in which they, or their stand-ins, step.

    Args:
        plan: the plan that ran.
        costs: of its stages.
        traces: of its steps. The time of a STEP is its mean over replicas.
        quantile: of times over steps, between 0 and 1.
    """
    series: dict[int, list[float]] = {}
    for trace in traces:
        step: dict[int, list[float]] = {}
        for event in trace.events:
            if event.action.kind is Kind.STEP:
                step.setdefault(event.action.stage, []).append(event.end_s - event.start_s)
        for stage, times in step.items():
            series.setdefault(stage, []).append(statistics.fmean(times))
    found = list(costs)
    for stage, times in series.items():
        parts = plan.mesh.data if shards(plan, stage) else 1
        found[stage] = evolve(costs[stage], optimizer_s=parts * float(numpy.quantile(times, quantile)))
    return tuple(found)


def times_scaled(costs: Sequence[StageCosts], ratio: float) -> tuple[StageCosts, ...]:
    """Costs with the times of all programs, and of collectives, multiplied by ``ratio``."""
    return tuple(
        evolve(
            cost,
            forward_s=cost.forward_s * ratio,
            backward_s=cost.full_backward_s * ratio,
            backward_input_s=cost.backward_input_s * ratio,
            backward_weight_s=cost.backward_weight_s * ratio,
            recompute_s=None if cost.recompute_s is None else cost.recompute_s * ratio,
            collectives=None if cost.collectives is None else cost.collectives.scaled(ratio),
        )
        for cost in costs
    )


def rehearsed_costs(
    plan: Plan, costs: Sequence[StageCosts], traces: Sequence[Trace], quantile: float
) -> tuple[StageCosts, ...]:
    """Stage costs with the times in traces of the plan, over microbatches and steps.

    Args:
        plan: the plan that ran.
        costs: its known costs.
        traces: of its steps.
        quantile: of a program's times over steps, between 0 and 1.
    """
    series: dict[tuple[int, Kind], list[float]] = {}
    for trace in traces:
        step: dict[tuple[int, Kind], list[float]] = {}
        for event in trace.events:
            step.setdefault((event.action.stage, event.action.kind), []).append(event.end_s - event.start_s)
        for program, times in step.items():
            series.setdefault(program, []).append(statistics.fmean(times))
    found = {program: float(numpy.quantile(times, quantile)) for program, times in series.items()}
    again = plan.memory.recompute
    return tuple(
        _updated(cost, stage.index, found, stage.index in again) for stage, cost in zip(plan.stages, costs, strict=True)
    )


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


def _stages(plan: Plan) -> Stages:
    return tuple(stage.nodes for stage in plan.stages)
