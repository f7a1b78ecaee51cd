"""Scores a plan for the planner by simulating it. The latest result is kept for the answer about the plan."""

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from ..core.cluster.cluster import Cluster
from ..core.costs.costs import StageCosts
from ..core.plan.plan import Plan
from ..core.search import Score
from .result import SimulationResult
from .run import simulate

_latest: list[SimulationResult] = []


def simulated(plan: Plan, costs: tuple[StageCosts, ...], cluster: Cluster) -> Score:
    """Score a plan by simulating it."""
    _latest.clear()  # before the next one takes as much memory
    result = simulate(plan, costs, cluster)
    _latest.append(result)
    return Score(
        step_s=result.step_s,
        peak_memory_bytes=result.peak_memory_bytes,
        peak_saved_bytes=result.peak_saved_bytes,
        bubble_ratio=result.bubble_ratio,
    )


def simulated_step(plan: Plan) -> SimulationResult:
    """The simulated step of a plan with a prediction; that of the latest score, if it was of the same orders."""
    if _latest and _what_runs(_latest[0].plan, _latest[0].costs, _latest[0].cluster) == _what_runs(
        plan, plan.predicted.costs, plan.mesh.arrange(plan.predicted.cluster)
    ):
        result = evolve(_latest[0], plan=plan)
        vars(result)["timelines"] = _latest[0].timelines  # cached: for a million actions they take seconds
        return result
    return simulate(plan)


def _what_runs(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> tuple[Any, ...]:
    """All that a step depends on: not the names of operators and devices, nor the prediction."""
    return (
        plan.device_actions, plan.placement, plan.edges, plan.microbatches, plan.tied, plan.sync, plan.shard,
        plan.mesh.data, plan.mesh.sharing, evolve(plan.memory, within=""), tuple(costs), cluster,
    )  # fmt: skip
