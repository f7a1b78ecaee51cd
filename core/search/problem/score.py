"""How good a plan is, by an oracle that the planner is handed."""

from collections.abc import Callable

from attrs import evolve, frozen

from ...cluster.cluster import Cluster
from ...costs.costs import StageCosts
from ...plan.plan import Plan


@frozen
class Score:
    """What an oracle says of a plan.

    Args:
        step_s: time of one step.
        peak_memory_bytes, peak_saved_bytes: per device; everything, and saved tensors alone.
        bubble_ratio: 1 − the busiest device's compute time ÷ step time.
    """

    step_s: float
    peak_memory_bytes: tuple[float, ...]
    peak_saved_bytes: tuple[float, ...]
    bubble_ratio: float


Oracle = Callable[[Plan, tuple[StageCosts, ...], Cluster], Score]
"""Scores a plan that has no prediction yet, from the costs of its stages on a cluster."""


def by_position(score: Score, devices: int) -> Score:
    """The most of every replica, of so many devices each, where an oracle tells each on its own."""
    peaks, saved = score.peak_memory_bytes, score.peak_saved_bytes
    return evolve(
        score,
        peak_memory_bytes=tuple(max(peaks[position::devices]) for position in range(devices)),
        peak_saved_bytes=tuple(max(saved[position::devices]) for position in range(devices)),
    )


def with_costs(plan: Plan, costs: tuple[StageCosts, ...], oracle: Oracle) -> Plan:
    """The plan with its prediction made again from other costs; what was measured for the one before is left out."""
    assert plan.prediction is not None
    score = by_position(oracle(evolve(plan, prediction=None), costs, plan.prediction.cluster), plan.devices)
    return evolve(
        plan,
        prediction=evolve(
            plan.prediction,
            costs=costs,
            step_s=score.step_s,
            peak_memory_bytes=score.peak_memory_bytes,
            peak_saved_bytes=score.peak_saved_bytes,
            bubble_ratio=score.bubble_ratio,
            interval_s=None,
            reference_s=None,
        ),
    )
