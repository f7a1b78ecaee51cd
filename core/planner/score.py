"""How good a plan is, by an oracle that the planner is handed; and the count of how often it was asked."""

from collections.abc import Callable, Sequence

from attrs import define, field, frozen

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

Progress = Callable[[int, int, float], None]
"""Told now and then: evaluations done, the budget, and the best step time that fits (infinite while none does)."""

Rank = tuple[float, float]
"""Smaller is better: bytes of the worst device above its limit, then the step time."""


@frozen
class Candidate:
    """A plan with what it was scored by."""

    plan: Plan
    costs: tuple[StageCosts, ...]
    score: Score
    rank: Rank


@define
class Judge:
    """Asks the oracle, at most ``budget`` times.

    Args:
        oracle: see :data:`Oracle`.
        cluster: the machine.
        limits: bytes that each device may hold.
        budget: evaluations it may spend.
        progress: see :data:`Progress`.
        reserved: how many of these are for later.
        evaluations: those spent.
        best: the best candidate so far.
    """

    oracle: Oracle
    cluster: Cluster
    limits: Sequence[float]
    budget: int
    progress: Progress | None = None
    reserved: int = 0
    evaluations: int = 0
    best: Candidate | None = field(default=None, init=False)

    @property
    def left(self) -> int:
        """Evaluations not yet spent, beside those reserved."""
        return self.budget - self.reserved - self.evaluations

    def score(self, plan: Plan, costs: tuple[StageCosts, ...]) -> Candidate:
        """Score one plan and keep it if it is the best."""
        score = self.oracle(plan, costs, self.cluster)
        self.evaluations += 1
        over = max(peak - limit for peak, limit in zip(score.peak_memory_bytes, self.limits, strict=True))
        candidate = Candidate(plan, costs, score, (max(over, 0.0), score.step_s))
        if self.best is None or candidate.rank < self.best.rank:
            self.best = candidate
        if self.progress is not None:
            over_best, step_s = self.best.rank
            self.progress(self.evaluations, self.budget, step_s if over_best == 0 else float("inf"))
        return candidate
