"""Convert a time budget into a number of evaluations, so that the result can be reproduced without a clock."""

import time
from collections.abc import Callable, Iterable, Sequence

from ...errors import RequestError
from ...schedules.problem import ScheduleFamily, ScheduleProblem
from ...schedules.scored import Scored
from ...schedules.tradeoff import fastest
from .auto import find_schedule

PILOTS = (2_000, 20_000, 60_000)
"""Evaluations of the searches that measure the cost of one evaluation; the first also loads the compiled code."""
SHARE = 0.95
"""Share of the remaining time for the last search, because the measured cost may drift."""


def find_schedule_within(
    problems: Sequence[ScheduleProblem],
    families: Iterable[ScheduleFamily],
    *,
    seconds: float,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Scored:
    """The fastest schedule found within a memory limit and about ``seconds``.

    Small searches measure the fixed cost of a search and the cost of one evaluation. A last search spends the rest of
    the time. The schedule's name contains the number of evaluations; ``find_schedule`` with that number returns the
    same bytes.

    Args:
        problems, families, seed: as in ``find_schedule``.
        seconds: for all searches together. The first small search runs even if it takes longer.
        clock: seconds from any start.

    Raises:
        RequestError: ``seconds`` is not above 0.
        InfeasibleError: the limit is below one microbatch on every stage of a device.
    """
    if not seconds > 0:
        raise RequestError(f"the time limit of a search is {seconds:g} s: give a time above 0, such as 10")
    known, deadline = list(families), clock() + seconds

    def search(evaluations: int) -> tuple[Scored, float]:
        begin = clock()
        return find_schedule(problems, known, evaluations=evaluations, seed=seed), clock() - begin

    best, spent = search(PILOTS[0])
    for evaluations in PILOTS[1:]:
        if best.gap == 0 or 2 * spent > deadline - clock():
            return best
        before = spent
        found, spent = search(evaluations)
        best = fastest([best, found])
    each = max((spent - before) / (PILOTS[-1] - PILOTS[-2]), 1e-9)
    fixed = spent - PILOTS[-1] * each
    affordable = int((SHARE * (deadline - clock()) - fixed) / each)
    if best.gap == 0 or affordable <= PILOTS[-1]:
        return best
    return fastest([best, search(affordable)[0]])
