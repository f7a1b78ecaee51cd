"""Which plan to prefer if their times are equal: less memory, then fewer stages, then the simpler schedule."""

import math
import re
from collections.abc import Callable, Container, Sequence
from typing import Any

from ...actions import BACKWARD_KINDS, LAST_BACKWARD, Action
from ...plan.plan import Plan
from ...policies.sharding import NONE, shards_gradients
from ..problem.blocks import Stages

ALIKE = 0.05
"""Difference, as a share of a step, below which two predictions count as equal: the stages were measured alone, and
their costs while all stages run are not known more precisely."""
EQUAL = 0.01
"""The same for orders of the same stages, of whose times only the messages differ. What an action takes in addition to
its computation is not predicted: the fewest actions are preferred."""
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
        name, own = family_of(plan), plan.schedule.startswith("auto(")
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
    order: Callable[[Plan], Preference],
    regular: Container[Stages],
    *,
    plain: Sequence[Plan] = (),
    most: int = MOST,
) -> list[Plan]:
    """The plans that the first steps of training compare; the one that runs first comes first.

    These are, in this order and without those that run the same actions: the plain plan, for each placement of stages
    the one with the fewest actions among the fastest, the fastest for each cut, and the one that needs the least
    memory. Those predicted to be more than ``HOPELESS`` slower than the fastest are left out; the plain plan is always
    one.

    Args:
        plans: with predictions; at least one.
        order: the sorting key (see :func:`preference`).
        regular: cuts that hardly depend on the measured times, from which the first plan is taken.
        plain: a plan that is always compared, such as 1F1B; none or one.
    """
    by_time = sorted(plans, key=lambda plan: (_step_s(plan), order(plan)))
    by_place = [fewest_actions([p for p in by_time if p.placement == place]) for place in {p.placement for p in plans}]
    by_cut = list({_cut(plan): plan for plan in reversed(by_time)}.values())[::-1]
    least = min(plans, key=lambda plan: (max(plan.predicted.peak_memory_bytes), order(plan)))
    enough, found = (1 + HOPELESS) * _step_s(by_time[0]), dict[Any, Plan]()
    for plan in (*plain, *sorted(by_place, key=_step_s), *sorted(by_cut, key=_step_s), least):
        if _step_s(plan) <= enough or plan in plain:
            found.setdefault((plan.stages, plan.device_actions, plan.memory), plan)
    compared = list(found.values())[:most]
    first = preferred([plan for plan in compared if _cut(plan) in regular] or compared, order)
    return [first, *(plan for plan in compared if plan is not first and sums_of(plan) == sums_of(first))]


def fewest_actions(plans: Sequence[Plan]) -> Plan:
    """The plan with the fewest actions among those that are predicted to be within ``EQUAL`` of the fastest."""
    fastest = min(map(_step_s, plans))
    alike = [plan for plan in plans if _step_s(plan) <= (1 + EQUAL) * fastest]
    return min(alike, key=lambda plan: (sum(map(len, plan.device_actions)), _step_s(plan)))


def family_of(plan: Plan) -> str:
    """The name of the family that a plan's schedule is of, or from which its order was changed."""
    found = re.match(r"(?:auto\()?([^()+]*)", plan.schedule)
    return found[1] if found else plan.schedule


def _cut(plan: Plan) -> Stages:
    return tuple(stage.nodes for stage in plan.stages)


def sums_of(plan: Plan) -> tuple[dict[str, int], Stages, tuple[tuple[Action, ...], ...]]:
    """What sums of gradients depend on: where it differs, they round differently.

    That is how many stages read each tied weight; what replicas share a part of each, which is cut by stages; and what
    replicas sum at a time, where they share gradients: those of all I and W of a stage until then.
    """
    shared = any(level != NONE for level in plan.shard)
    backwards = (
        tuple(a for a in plan.device_actions[stage.device] if a.stage == stage.index and a.kind in _BACKWARD)
        for stage in plan.stages
        if shards_gradients(plan, stage.index)
    )
    return {weight.name: len(weight.stages) for weight in plan.tied}, _cut(plan) if shared else (), tuple(backwards)


_BACKWARD = BACKWARD_KINDS.union(LAST_BACKWARD)


def _step_s(plan: Plan) -> float:
    return plan.predicted.step_s
