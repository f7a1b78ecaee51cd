"""Scores a plan for the planner by simulating it."""

from ..core.cluster.cluster import Cluster
from ..core.costs.costs import StageCosts
from ..core.plan.plan import Plan
from ..core.search import Score
from .run import simulate


def simulated(plan: Plan, costs: tuple[StageCosts, ...], cluster: Cluster) -> Score:
    """Score a plan by simulating it."""
    result = simulate(plan, costs, cluster)
    return Score(
        step_s=result.step_s,
        peak_memory_bytes=result.peak_memory_bytes,
        peak_saved_bytes=result.peak_saved_bytes,
        bubble_ratio=result.bubble_ratio,
    )
