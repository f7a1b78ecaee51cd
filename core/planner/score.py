"""How good a plan is, by an oracle that the planner is handed."""

from collections.abc import Callable

from attrs import frozen

from ..cluster import Cluster
from ..costs import StageCosts
from ..plan import Plan


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
