"""A time budget, made a number of evaluations, so that what was found can be found again without a clock."""

import time
from collections.abc import Callable, Iterable, Sequence

from ..errors import RequestError
from ..schedules.problem import ScheduleFamily, ScheduleProblem
from ..schedules.scored import Scored
from .auto import find_schedule

PILOTS = (2_000, 20_000, 60_000)
"""Evaluations of the searches that tell what one costs; the first loads what is compiled."""
SHARE = 0.95
"""Of the time that is left, what the last search is given: costs drift."""


def find_schedule_within(
    problems: Sequence[ScheduleProblem], families: Iterable[ScheduleFamily], *, seconds: float, seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Scored:  # fmt: skip
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
    known = list(families)
    start = clock()
    best: Scored | None = None
    spent: list[tuple[int, float]] = []

    def search(evaluations: int) -> Scored:
        begin = clock()
        found = find_schedule(problems, known, evaluations=evaluations, seed=seed)
        spent.append((evaluations, clock() - begin))
        return found if best is None or found.result.makespan < best.result.makespan else best

    for evaluations in PILOTS:
        if best is not None and (best.gap == 0 or 2 * spent[-1][1] > start + seconds - clock()):
            return best
        best = search(evaluations)
    (fewer, short), (more, long) = spent[-2:]
    each = max((long - short) / (more - fewer), 1e-9)
    affordable = int((SHARE * (start + seconds - clock()) - (long - more * each)) / each)
    return best if best is not None and (best.gap == 0 or affordable <= more) else search(affordable)
