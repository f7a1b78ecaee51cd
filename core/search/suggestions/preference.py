"""Which plan to prefer where time does not decide: less memory, then fewer stages, then the simpler schedule."""

import math
import re
from collections.abc import Callable, Sequence

from ...plan.plan import Plan

ALIKE = 0.05
"""Shares of a step below which two predictions from stages that were measured alone are equal: what they cost while all
stages run is known no better."""
GAIN = 0.02
"""Share of a step that a plan must be predicted to gain over a plain one, to be measured against it."""
STEP_OF_MEMORY = 1.1
"""Plans whose fullest devices hold bytes between two powers of this need about as much memory."""

Preference = tuple[int, int, bool, int, str]
"""Smaller is preferred: which power of bytes the fullest device holds, stages, whether the order departs from its
family's, the place of the family among those to choose from, and the schedule's name."""


def preference(families: Sequence[str]) -> Callable[[Plan], Preference]:
    """What plans with predictions are sorted by.

    Args:
        families: names of the schedules to choose among, simple ones first.
    """

    def of(plan: Plan) -> Preference:
        assert plan.prediction is not None
        found = re.match(r"(auto\()?([^()+]*)", plan.schedule)
        own, name = (bool(found[1]), found[2]) if found else (True, plan.schedule)
        place = families.index(name) if name in families else len(families)
        held = max(*plan.prediction.peak_memory_bytes, 1.0)
        return round(math.log(held, STEP_OF_MEMORY)), len(plan.stages), own, place, plan.schedule

    return of


def preferred(plans: Sequence[Plan], order: Callable[[Plan], Preference], alike: float = ALIKE) -> Plan:
    """Of the plans predicted to be about as fast as the fastest, the one that comes first."""
    fastest = min(_step_s(plan) for plan in plans)
    return min((plan for plan in plans if _step_s(plan) <= (1 + alike) * fastest), key=order)


def worth_rehearsing(
    plans: Sequence[Plan], plain: Sequence[Plan], order: Callable[[Plan], Preference], most: int
) -> list[Plan]:
    """The plans to measure against each other, the one to prefer first.

    A plain one in any case. For each number of stages the preferred one, where it is predicted to gain at least
    ``GAIN`` over the plain one; of these the fastest.

    Args:
        plans: with predictions; at least one.
        plain: what is measured in any case, such as 1F1B; none or one.
        order: what is preferred (see :func:`preference`).
        most: plans at most.
    """
    counts = sorted({len(plan.stages) for plan in plans})
    best = [preferred([plan for plan in plans if len(plan.stages) == count], order) for count in counts]
    if plain:
        enough = min(map(_step_s, plain)) / (1 + GAIN)
        best = [plan for plan in best if _step_s(plan) <= enough]
    else:
        best = [plan for plan in best if _step_s(plan) <= (1 + ALIKE) * min(map(_step_s, best))]
    room = max(most - len(plain), 0 if plain else 1)
    return sorted([*plain, *sorted(best, key=_step_s)[:room]], key=order)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
