"""Which plan to prefer where time does not decide: less memory, then fewer stages, then the simpler schedule."""

import math
import re
from collections.abc import Callable, Sequence

from ..plan import Plan

ALIKE = 0.02
"""Shares of a step below which two predictions are equal: no prediction from a few measured steps is better."""

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
    plans: Sequence[Plan], plain: Sequence[Plan], order: Callable[[Plan], Preference], most: int, far: float
) -> list[Plan]:
    """The plans to measure against each other, the one to prefer first.

    For each number of stages the preferred one, unless it is predicted to be far from the fastest of all; and a plain
    one, however slow. What is preferred to another one and about as fast leaves it out.

    Args:
        plans: with predictions.
        plain: those that are measured in any case, such as 1F1B.
        order: what is preferred (see :func:`preference`).
        most: plans at most; of the others the fastest stay.
        far: how many times the fastest step may take.
    """
    fastest = min(_step_s(plan) for plan in plans)
    counts = sorted({len(plan.stages) for plan in plans})
    best = [preferred([plan for plan in plans if len(plan.stages) == count], order) for count in counts]
    best = sorted((plan for plan in best if _step_s(plan) <= far * fastest), key=order)
    chosen = list(plain)
    for plan in best:
        if all(_step_s(plan) < _step_s(other) / (1 + ALIKE) for other in chosen if order(other) <= order(plan)):
            chosen.append(plan)
    chosen = list({plan.hash: plan for plan in chosen}.values()) or best[:1]
    others = sorted((plan for plan in chosen if plan not in plain), key=_step_s)
    return sorted([*plain, *others][: max(most, 1)], key=order)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
