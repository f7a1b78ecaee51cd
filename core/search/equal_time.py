"""Less memory for the same step: what the search itself does not look for while its plans fit.

The search minimises the step. Of its results with equal steps the one whose fullest device holds least comes first, and
is searched further under lower limits: as long as a plan within them has the same step, it is the next one.
"""

from collections.abc import Sequence

from attrs import evolve

from ..tradeoff import EQUAL, by_time
from .annealing.search import Round, all_rounds, evaluate_all
from .annealing.walk import Walk
from .problem.meter import Meter, Stopped
from .problem.search_space import SearchSpace

SHARE = 0.1
"""Share of the budget for the searches under lower limits together."""
TRIES = 6
"""How many of them there are."""
LOWER = (0.75, 0.9, 0.97, 0.995)
"""Limits as shares of the fullest device's peak: after one that is too low, the next; then no other."""
FEW = 2
"""Most walks that a search under a lower limit starts from."""
ORDERS, CUTS = Round(FEW, FEW, 1.0, 0.001, 0.08), Round(FEW, FEW, 1.0, 0.0, 1.0)
"""Such a search: of cuts and orders, or of cuts if orders must be a family's."""


def least_memory_first(walks: Sequence[Walk]) -> list[Walk]:
    """The walks that fit by step and memory, then the others in their order."""
    fit = [walk for walk in walks if walk.excess == 0]
    others = [walk for walk in walks if walk.excess > 0]
    return [*by_time(fit, lambda walk: walk.step_s, _most), *others]


def with_less_memory(walks: Sequence[Walk], space: SearchSpace, meter: Meter, seed: int) -> tuple[list[Walk], bool]:
    """Continue the fastest walks under lower limits, and add those found that are as fast.

    Args:
        walks: of a search, by step and memory; the first one fits.
        space: the choices of the search.
        meter: its number of evaluations determines how many follow; counts them, too.
        seed: of the random numbers.

    Returns:
        The walks by step and memory, and whether a time limit or an interrupt ended the search early.
    """
    found, level, stopped = list(walks), 0, False
    try:
        meter.spend(0, found[0].step_s)  # a start may lead that no round has counted
    except Stopped:
        return found, True
    for _ in range(TRIES):
        if level == len(LOWER) or stopped or meter.exhausted:
            break
        best = found[0]
        limit = LOWER[level] * _most(best)
        lower = evolve(best.setting, memory=tuple(min(one, limit) for one in best.setting.memory))
        equal = [walk for walk in found if walk.setting is best.setting and _as_fast(walk, best)][:FEW]
        more = [evolve(walk, setting=lower, best=walk.best.copy()) for walk in equal]
        part = meter.part(max(int(SHARE * meter.budget) // TRIES, 1))
        try:
            evaluate_all(more)
            all_rounds(more, [ORDERS if space.anneal else CUTS], part, seed)
        except (Stopped, KeyboardInterrupt):
            stopped = True
        meter.spent += part.spent
        fitting = [walk for walk in more if walk.excess == 0 and _as_fast(walk, best)]
        if not fitting:
            level += 1
            continue
        known = [evolve(walk, setting=best.setting, best=walk.best.copy()) for walk in fitting]
        found = least_memory_first([*known, *found])
    return found, stopped


def _as_fast(walk: Walk, other: Walk) -> bool:
    return walk.step_s <= other.step_s * (1 + EQUAL)


def _most(walk: Walk) -> float:
    return max(walk.peaks)
