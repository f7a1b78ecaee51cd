"""The search where messages share links: it continues from the walks of the search without contention.

An evaluation with contention takes some fifty times as long as one without, so it is used for a second, shorter search:
all walks, the published schedules too, are timed with contention; the better ones are annealed further, in fewer and
fewer walks. Where no messages contend in the best plan, nothing is searched again.
"""

from collections.abc import Sequence

from .annealing.search import Round, all_rounds, evaluate_all
from .annealing.walk import Walk, best_by_placement, ranked
from .finalize import ScoredPlan
from .problem.meter import Meter, Stopped
from .problem.oracle import longest_path
from .problem.score import Oracle
from .problem.search_space import SearchSpace
from .problem.setting import Setting

NOTICEABLE = 0.01
"""Share of the step by which contention has to prolong the best plan for a further search: no plan is faster with
contention than without, so less than that is the most that a further search could gain."""
SHARE = 1 / 16
"""Evaluations with contention ÷ evaluations without: together they take about as long again."""
LEAST = 300
"""Smallest number of evaluations."""
STARTS, ALIKE = 16, 3
"""Walks that are annealed with contention, and how many of them may have the same placement."""

ORDERS = (Round(STARTS, ALIKE, 0.3, 0.002, 0.15), Round(5, 2, 0.3, 0.002, 0.15), Round(2, 2, 0.4, 0.001, 0.15))
"""Rounds for cuts and orders."""
CUTS = (Round(STARTS, ALIKE, 0.5, 0.0, 1.0), Round(4, 2, 0.5, 0.0, 1.0))
"""Rounds for cuts alone, if orders must be a family's."""


def contends(scored: ScoredPlan, judge: Oracle | None) -> bool:
    """Whether contention prolongs a plan's step noticeably.

    Args:
        scored: with its oracle's score: that of ``longest_path``, if there is a judge.
        judge: times the step with contention; None if the oracle does.
    """
    plan, costs, cluster = scored.plan, scored.costs, scored.setting.cluster
    own_s = scored.score.step_s
    other_s = (judge or longest_path)(plan, costs, cluster).step_s
    return max(own_s, other_s) > (1 + NOTICEABLE) * min(own_s, other_s)


def contended(
    walks: Sequence[Walk], settings: Sequence[Setting], space: SearchSpace, meter: Meter, seed: int
) -> tuple[list[Walk], bool]:
    """Continue walks with contention.

    Args:
        walks: of a search, now in settings with contention.
        settings: these settings.
        space: the choices of the search.
        meter: its number of evaluations determines how many follow; counts them, too.
        seed: of the random numbers.

    Returns:
        The walks, best first, and whether a time limit or an interrupt ended the search early.
    """
    own = meter.part(max(int(SHARE * meter.budget), LEAST))
    stopped = False
    if own.most is not None:
        walks = walks[: own.left]
    try:
        evaluate_all(walks)
        own.spend(len(walks))
        chosen = best_by_placement(list(walks), STARTS, ALIKE)
        all_rounds(chosen, ORDERS if space.anneal else CUTS, own, seed)
    except (Stopped, KeyboardInterrupt):
        stopped = True
    meter.spent += own.spent
    return ranked(list(walks)), stopped
