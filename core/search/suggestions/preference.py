"""Which plan to prefer if their times are equal: less memory, then fewer stages, then the simpler schedule."""

import math
import re
from collections.abc import Callable, Sequence

from ...plan.plan import Plan

ALIKE = 0.05
"""Difference, as a share of a step, below which two predictions count as equal: the stages were measured alone, and
their costs while all stages run are not known more precisely."""
GAIN = 0.02
"""Predicted gain over a plain plan, as a share of the step, from which a plan is measured against it."""
STEP_OF_MEMORY = 1.1
"""Plans whose fullest devices hold bytes between two powers of this count as equal in memory."""

Preference = tuple[int, int, bool, int, str]
"""Smaller is preferred: the fullest device's bytes as a power of ``STEP_OF_MEMORY``, the number of stages, whether the
order differs from its family's, the family's index among those to choose from, and the schedule's name."""


def preference(families: Sequence[str]) -> Callable[[Plan], Preference]:
    """The sorting key of plans with predictions.

    Args:
        families: names of the schedules to choose among, simple ones first.
    """

    def of(plan: Plan) -> Preference:
        found = re.match(r"(auto\()?([^()+]*)", plan.schedule)
        own, name = (bool(found[1]), found[2]) if found else (True, plan.schedule)
        place = families.index(name) if name in families else len(families)
        held = max(*plan.predicted.peak_memory_bytes, 1.0)
        return round(math.log(held, STEP_OF_MEMORY)), len(plan.stages), own, place, plan.schedule

    return of


def preferred(plans: Sequence[Plan], order: Callable[[Plan], Preference], alike: float = ALIKE) -> Plan:
    """The first by ``order`` of the plans whose predicted time is within ``alike`` of the fastest plan's."""
    fastest = min(_step_s(plan) for plan in plans)
    return min((plan for plan in plans if _step_s(plan) <= (1 + alike) * fastest), key=order)


def worth_rehearsing(
    plans: Sequence[Plan], plain: Sequence[Plan], order: Callable[[Plan], Preference], most: int
) -> list[Plan]:
    """The plans to measure against each other, sorted by preference.

    The plain plan is always one of them. The others are the preferred plan for each number of stages, if its predicted
    gain over the plain plan is at least ``GAIN``; if these are too many, the fastest of them.

    Args:
        plans: with predictions; at least one.
        plain: a plan that is always measured, such as 1F1B; none or one.
        order: the sorting key (see :func:`preference`).
        most: largest number of plans.
    """
    counts = sorted({len(plan.stages) for plan in plans})
    best = [preferred([plan for plan in plans if len(plan.stages) == count], order) for count in counts]
    if plain:
        enough = min(map(_step_s, plain)) / (1 + GAIN)
        best = [plan for plan in best if _step_s(plan) <= enough]
    else:
        best = [plan for plan in best if _step_s(plan) <= (1 + ALIKE) * min(map(_step_s, best))]
    others = max(most - len(plain), 0 if plain else 1)
    return sorted([*plain, *sorted(best, key=_step_s)[:others]], key=order)


def _step_s(plan: Plan) -> float:
    return plan.predicted.step_s
