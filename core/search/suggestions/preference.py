"""Which plan to prefer if their times are equal: less memory, then fewer stages, then the simpler schedule."""

import math
import re
from collections.abc import Callable, Container, Sequence

from ...plan.plan import Plan
from ...plan.sharding import NONE
from ..problem.blocks import Stages

ALIKE = 0.05
"""Difference, as a share of a step, below which two predictions count as equal: the stages were measured alone, and
their costs while all stages run are not known more precisely."""
HOPELESS, MOST = 0.2, 4
"""Predicted slowness, as a share of the fastest step, from which a plan is not compared; largest number that are."""
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


def candidates(
    plans: Sequence[Plan],
    plain: Sequence[Plan],
    order: Callable[[Plan], Preference],
    regular: Container[Stages],
    most: int = MOST,
) -> list[Plan]:
    """The plans that the first steps of training compare; the one that runs first comes first.

    These are the plain plan, the fastest for each cut, and the one that needs the least memory, without
    those predicted to be more than ``HOPELESS`` slower than the fastest; the plain plan is always one.

    Args:
        plans: with predictions; at least one.
        plain: a plan that is always compared, such as 1F1B; none or one.
        order: the sorting key (see :func:`preference`).
        regular: cuts that hardly depend on the measured times, from which the first plan is taken.
        most: largest number of plans.
    """
    cuts = dict.fromkeys(map(_cut, plans))
    by_cut = ([plan for plan in plans if _cut(plan) == cut] for cut in cuts)
    fastest = sorted((min(same, key=lambda plan: (_step_s(plan), order(plan))) for same in by_cut), key=_step_s)
    least = min(plans, key=lambda plan: (max(plan.predicted.peak_memory_bytes), order(plan)))
    enough = (1 + HOPELESS) * _step_s(fastest[0])
    found: dict[str, Plan] = {}
    others = sorted(fastest[1:], key=lambda plan: _cut(plan) not in regular)
    for plan in (fastest[0], *plain, *others, least):
        if _step_s(plan) <= enough or plan in plain:
            found.setdefault(plan.hash, plan)
    compared = list(found.values())[:most]
    first = preferred([plan for plan in compared if _cut(plan) in regular] or compared, order)
    return [first, *(plan for plan in compared if plan is not first and _sums(plan) == _sums(first))]


def _cut(plan: Plan) -> Stages:
    return tuple(stage.nodes for stage in plan.stages)


def _sums(plan: Plan) -> tuple[dict[str, int], Stages]:
    """What sums of gradients depend on: where it differs, they round differently.

    That is how many stages read each tied weight; and what replicas share a part of each, which is cut by stages.
    """
    shared = any(level != NONE for level in plan.shard)
    return {weight.name: len(weight.stages) for weight in plan.tied}, _cut(plan) if shared else ()


def _step_s(plan: Plan) -> float:
    return plan.predicted.step_s
