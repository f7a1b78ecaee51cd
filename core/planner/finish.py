"""From walks to plans with predictions: the last word has the oracle."""

from collections.abc import Sequence

from attrs import evolve, frozen

from ..costs import StageCosts
from ..plan import Plan, Prediction
from ..schedules.problem import Schedule
from .assemble import assemble, with_replicas
from .infeasible import NothingFits
from .score import Oracle, Score
from .setting import Setting
from .walk import Walk

Rank = tuple[float, float]
"""Smaller is better: bytes of the worst device above its limit, then the step time."""


@frozen
class Candidate:
    """A plan with what it was scored by, in which setting."""

    plan: Plan
    costs: tuple[StageCosts, ...]
    score: Score
    rank: Rank
    setting: Setting


def draft(walk: Walk) -> tuple[Plan, tuple[StageCosts, ...]]:
    """The plan of a walk's best place, without a prediction, and the costs of its stages."""
    setting = walk.setting
    schedule = Schedule(walk.name, tuple(walk.best.placement.tolist()), setting.microbatches, walk.orders())
    stages, costs, edges = setting.staged(walk.best.cuts.tolist(), schedule.placement)
    plan = assemble(setting.graph, stages, schedule, parameter_sizes=setting.parameter_sizes, edges=edges)
    return plan, costs if setting.fixed else with_replicas(setting.graph, costs, plan.tied)


def scored(walk: Walk, oracle: Oracle) -> Candidate:
    """A walk's plan with what the oracle says of it."""
    plan, costs = draft(walk)
    score = oracle(plan, costs, walk.setting.cluster)
    over = max(peak - limit for peak, limit in zip(score.peak_memory_bytes, walk.setting.limits, strict=True))
    return Candidate(plan, costs, score, (max(over, 0.0), score.step_s), walk.setting)


def predicted(candidate: Candidate, evaluations: int) -> Plan:
    """A candidate's plan with its prediction."""
    score = candidate.score
    return evolve(
        candidate.plan,
        prediction=Prediction(
            costs=candidate.costs,
            cluster=candidate.setting.cluster,
            step_s=score.step_s,
            peak_memory_bytes=score.peak_memory_bytes,
            peak_saved_bytes=score.peak_saved_bytes,
            bubble_ratio=score.bubble_ratio,
            evaluations=evaluations,
        ),
    )


def rescored(walks: Sequence[Walk], oracle: Oracle, most: int) -> list[Candidate]:
    """The first walks as the oracle sees them, best first; more than ``most`` only until one fits."""
    found: list[Candidate] = []
    for walk in walks:
        if len(found) >= most and min(candidate.rank[0] for candidate in found) == 0:
            break
        found.append(scored(walk, oracle))
    return sorted(found, key=lambda candidate: candidate.rank)


def refuse_above(best: Candidate, evaluations: int) -> None:
    """Refuse a plan that holds more than a device may.

    Raises:
        NothingFits: one line: the device that binds, what it holds by kind, and the smallest change that fits.
    """
    excess, _ = best.rank
    if excess <= 0:
        return
    score, limits, plan = best.score, best.setting.limits, best.plan
    over = [peak - limit for peak, limit in zip(score.peak_memory_bytes, limits, strict=True)]
    device = over.index(max(over))
    need, saved, limit = score.peak_memory_bytes[device], score.peak_saved_bytes[device], limits[device]
    state = sum(best.costs[stage.index].state_bytes for stage in plan.stages_on(device))
    raise NothingFits(
        f"device {device} ('{best.setting.cluster.devices[best.setting.positions[device]].name}') needs {need:.0f} "
        f"bytes and may hold {limit:.0f}: {state:.0f} of parameters, gradients and optimizer state, {saved:.0f} of "
        f"saved tensors (held by {plan.schedule}, {plan.microbatches} microbatches), "
        f"{max(need - state - saved, 0.0):.0f} of workspace; the smallest change that fits is {excess:.0f} bytes more "
        f"a device, {limit + excess:.0f} in all",
        predicted(best, evaluations), limits,
    )  # fmt: skip
