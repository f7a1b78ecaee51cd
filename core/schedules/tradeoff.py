"""The trade-off of time and memory: all named schedules of a problem, and the Pareto frontier."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .. import tradeoff
from ..errors import InfeasibleError, RequestError
from .problem import ScheduleFamily, ScheduleProblem
from .scored import Scored, score


def named_schedules(problem: ScheduleProblem, families: Iterable[ScheduleFamily]) -> Iterator[Scored]:
    """Every family that supports the problem, with each of its candidate parameter sets, scored.

    Schedules that a family refuses to build, for the problem or its memory limit, are skipped. Nothing else is checked:
    a family that ignores the limit may exceed it.
    """
    for family in families:
        for _, scored in candidate_schedules(problem, family):
            yield scored


def candidate_schedules(problem: ScheduleProblem, family: ScheduleFamily) -> Iterator[tuple[Mapping[str, Any], Scored]]:
    """As `named_schedules`, for one family: each schedule with its parameters."""
    for parameters in family.candidates(problem) if family.supports(problem) else ():
        try:
            schedule = family.build(problem, **parameters)
        except (RequestError, InfeasibleError):
            continue
        yield parameters, score(problem, schedule)


def peak_of(scored: Scored) -> float:
    """The largest peak of a device, in one device's share of a microbatch: comparable between numbers of chunks."""
    return max(scored.result.peak_memory) / scored.problem.chunks


def frontier(found: Sequence[Scored]) -> list[Scored]:
    """The Pareto frontier of memory and time: ascending memory, descending time.

    Of equals the first is kept.
    """
    return tradeoff.frontier(found, _makespan, peak_of)[::-1]


def search_limits(found: Sequence[Scored], limit: float | None) -> list[float]:
    """The memory limits at which a search is compared with named schedules, ascending.

    They are the peaks of the schedules on the frontier, and the given limit. The search keeps all saved tensors on the
    device, so peaks of schedules that offload are left out: it may have no order within them.

    Args:
        found: the named schedules.
        limit: of a device; None for no limit.
    """
    peaks = {peak_of(scored) for scored in frontier(found) if not scored.schedule.offload}
    return sorted(peaks if limit is None else {*peaks, limit})


def fastest(found: Sequence[Scored]) -> Scored:
    """The fastest schedule, of equally fast ones the one with the least memory."""
    return tradeoff.by_time(found, _makespan, peak_of)[0]


def _makespan(scored: Scored) -> float:
    return scored.result.makespan
