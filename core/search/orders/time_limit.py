"""A time budget, made a number of evaluations, so that what was found can be found again without a clock."""

import time
from collections.abc import Callable, Iterable, Sequence

from ...errors import RequestError
from ...schedules.problem import ScheduleFamily, ScheduleProblem
from ...schedules.scored import Scored
from .auto import find_schedule

PILOTS = (2_000, 20_000, 60_000)
"""Evaluations of the searches that tell what one costs; the first loads what is compiled."""
SHARE = 0.95
"""Of the time that is left, what the last search is given: costs drift."""


def find_schedule_within(
    problems: Sequence[ScheduleProblem],
    families: Iterable[ScheduleFamily],
    *,
    seconds: float,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Scored:
    """The fastest schedule found within a memory limit and about so many seconds.

    Small searches tell what a search costs and what each of its evaluations does; one with as many evaluations as the
    rest of the time pays for comes last. The schedule's name tells their number, and ``find_schedule`` with that
    number returns the same bytes.

    Args:
        problems, families, seed: as in ``find_schedule``.
        seconds: for all of it. The first of the small searches runs whatever it takes.
        clock: seconds from any start.

    Raises:
        RequestError: there is no time.
        InfeasibleError: the limit is below one microbatch on every stage of a device.
    """
    if not seconds > 0:
        raise RequestError(f"{seconds:g} seconds for a search: give it some time, such as 10")
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
        best = min(best, found, key=_makespan)
    each = max((spent - before) / (PILOTS[-1] - PILOTS[-2]), 1e-9)
    fixed = spent - PILOTS[-1] * each
    affordable = int((SHARE * (deadline - clock()) - fixed) / each)
    if best.gap == 0 or affordable <= PILOTS[-1]:
        return best
    return min(best, search(affordable)[0], key=_makespan)


def _makespan(found: Scored) -> float:
    return found.result.makespan
