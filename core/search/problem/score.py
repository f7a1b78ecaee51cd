"""How good a plan is, by an oracle that the planner is handed."""

from collections.abc import Callable

from attrs import evolve, frozen

from ...cluster.cluster import Cluster
from ...costs.costs import StageCosts
from ...plan.plan import Plan


@frozen
class Score:
    """An oracle's score of a plan.

    Args:
        step_s: time of one step.
        peak_memory_bytes, peak_saved_bytes: per device: all memory, and saved tensors only.
        bubble_ratio: 1 − the busiest device's compute time ÷ step time.
    """

    step_s: float
    peak_memory_bytes: tuple[float, ...]
    peak_saved_bytes: tuple[float, ...]
    bubble_ratio: float


Oracle = Callable[[Plan, tuple[StageCosts, ...], Cluster], Score]
"""Scores a plan without a prediction, from the costs of its stages on a cluster."""


def by_position(score: Score, devices: int) -> Score:
    """The score with the peaks' maximum over replicas; ``devices`` is the number per replica."""
    peaks, saved = score.peak_memory_bytes, score.peak_saved_bytes
    return evolve(
        score,
        peak_memory_bytes=tuple(max(peaks[position::devices]) for position in range(devices)),
        peak_saved_bytes=tuple(max(saved[position::devices]) for position in range(devices)),
    )


def with_costs(plan: Plan, costs: tuple[StageCosts, ...], oracle: Oracle) -> Plan:
    """The plan with a new prediction from other costs, without the old prediction's measured fields."""
    score = by_position(oracle(evolve(plan, prediction=None), costs, plan.predicted.cluster), plan.devices)
    return evolve(
        plan,
        prediction=evolve(
            plan.predicted,
            costs=costs,
            step_s=score.step_s,
            peak_memory_bytes=score.peak_memory_bytes,
            peak_saved_bytes=score.peak_saved_bytes,
            bubble_ratio=score.bubble_ratio,
            interval_s=None,
        ),
    )


def predicted_again(plan: Plan, changed: Plan, oracle: Oracle) -> Plan:
    """The changed plan; if the plan had a prediction, with a new one from the same costs."""
    prediction = plan.prediction
    if changed is plan or prediction is None:
        return changed
    return with_costs(evolve(changed, prediction=prediction), prediction.costs, oracle)
