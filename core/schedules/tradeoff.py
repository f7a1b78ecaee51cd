"""Time against memory: all named schedules of a problem, and which of them no other one beats."""

from collections.abc import Iterable, Iterator, Sequence

from ..errors import InfeasibleError, RequestError
from .problem import ScheduleFamily, ScheduleProblem
from .scored import Scored, score


def named_schedules(problem: ScheduleProblem, families: Iterable[ScheduleFamily]) -> Iterator[Scored]:
    """Every family that suits the problem with every set of parameters that it offers for it, scored.

    What a family refuses to build, for the problem or for its memory limit, is left out. Nothing else is checked: a
    family that does not look at the limit may be above it.
    """
    for family in families:
        for parameters in family.candidates(problem) if family.suits(problem) else ():
            try:
                schedule = family.build(problem, **parameters)
            except (RequestError, InfeasibleError):
                continue
            yield score(problem, schedule)


def peak_of(scored: Scored) -> float:
    """The most that a device holds, in one device's share of a microbatch: comparable between numbers of chunks."""
    return max(scored.result.peak_memory) / scored.problem.chunks


def frontier(found: Sequence[Scored]) -> list[Scored]:
    """Those that no other one beats in time without holding more: ascending memory, descending time.

    Of equals the first one stays.
    """
    ordered = sorted(found, key=lambda scored: (peak_of(scored), scored.result.makespan))
    kept: list[Scored] = []
    for scored in ordered:
        if not kept or scored.result.makespan < kept[-1].result.makespan * (1 - 1e-9):
            kept.append(scored)
    return kept
