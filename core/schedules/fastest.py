"""The fastest of the named schedules, for a problem: every family with each of its candidate parameter sets."""

from collections.abc import Iterable, Sequence

from attrs import frozen

from ..costs import StageCosts
from ..errors import InfeasibleError
from ..evaluate import Evaluation, evaluate
from .problem import Schedule, ScheduleFamily, ScheduleProblem


@frozen
class Scored:
    """A schedule with what it gives, and how many schedules were evaluated to choose it."""

    problem: ScheduleProblem
    schedule: Schedule
    result: Evaluation
    evaluations: int = 1


def costs_of(problem: ScheduleProblem) -> Sequence[StageCosts]:
    """The problem's costs; without any, one unit of time for F, I and W and one of saved tensors for every stage."""
    return problem.costs if problem.costs is not None else [StageCosts(1, 1, 1, saved_bytes=1)] * problem.stages


def score(problem: ScheduleProblem, schedule: Schedule) -> Scored:
    """Evaluate one schedule of a problem."""
    costs = costs_of(problem)
    result = evaluate(schedule.device_actions, schedule.placement, costs, hop_s=problem.hop_s)
    return Scored(problem, schedule, result)


def fastest(problems: Iterable[ScheduleProblem], families: Iterable[ScheduleFamily]) -> Scored:
    """The schedule of least makespan within the memory limit; among equals the one of least peak memory.

    Args:
        problems: the same problem for each number of chunks to try.
        families: those to try; each takes part where it is made for the problem's number of chunks.

    Raises:
        InfeasibleError: none is within the limit; the message names the one that needs least.
    """
    known = list(families)
    scored = [
        score(problem, family.build(problem, **parameters))
        for problem in problems
        for family in known
        if family.suits(problem)
        for parameters in family.candidates(problem)
    ]
    if not scored:
        raise InfeasibleError("no schedule is made for this number of chunks: give another one")
    fitting = [one for one in scored if not exceeds(one)]
    if not fitting:
        least = min(scored, key=lambda one: max(one.result.peak_memory))
        raise InfeasibleError(
            f"no schedule holds at most {least.problem.memory_limit:g} of saved tensors: the least is "
            f"{max(least.result.peak_memory):g}, by {least.schedule.name}; raise the limit or use more devices"
        )
    best = min(fitting, key=lambda one: (one.result.makespan, max(one.result.peak_memory)))
    return Scored(best.problem, best.schedule, best.result, len(scored))


def exceeds(scored: Scored) -> bool:
    """Whether some device holds more than the limit, by more than rounding."""
    limit = scored.problem.memory_limit
    return limit is not None and max(scored.result.peak_memory) > limit * (1 + 1e-9)
