"""Schedules with their evaluated time and memory; all named ones of a problem, and their Pareto frontier."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from .. import tradeoff
from ..costs.costs import StageCosts
from ..plan.memory_policy import StageOffload, TimedCopy
from ..timing.orders import Evaluation, evaluate
from .problem import Schedule, ScheduleFamily, ScheduleProblem

ROUNDING = 1e-9
"""Share by which a sum of times or bytes may exceed a limit: floating-point sums depend on the order of addition."""


@frozen
class Scored:
    """A schedule with its evaluation.

    Args:
        problem: the problem that the schedule solves.
        schedule: the order of every device.
        result: its evaluation.
        evaluations: number of orders evaluated to find it.
        bound: a proven lower bound of the makespan of any order; None if a search proved none.
        offload, copies: what each stage offloads, and per device its copies to the host; empty if the schedule does not
            offload.
    """

    problem: ScheduleProblem
    schedule: Schedule
    result: Evaluation
    evaluations: int = 1
    bound: float | None = None
    offload: tuple[StageOffload, ...] = ()
    copies: Sequence[Sequence[TimedCopy]] = ()

    @property
    def gap(self) -> float | None:
        """How far the makespan is above the bound, as a share of the bound."""
        if self.bound is None:
            return None
        return self.result.makespan / self.bound - 1 if self.bound else 0.0


def costs_of(problem: ScheduleProblem) -> Sequence[StageCosts]:
    """The problem's costs; by default one unit of time for F, I and W and one of saved tensors for every stage."""
    return problem.costs if problem.costs is not None else [StageCosts(1, 1, 1, saved_bytes=1)] * problem.stages


def score(problem: ScheduleProblem, schedule: Schedule) -> Scored:
    """Evaluate one schedule of a problem."""
    costs = costs_of(problem)
    offload: tuple[StageOffload, ...] = ()
    copies: Sequence[Sequence[TimedCopy]] = ()
    if schedule.offload:
        from ..offload.plan_offload import schedule_copies  # here: most schedules need none

        offload, copies = schedule_copies(
            schedule.device_actions, schedule.placement, schedule.offload, costs, problem.hop_s, problem.copy_s_per_byte
        )
    result = evaluate(schedule.device_actions, schedule.placement, costs, hop_s=problem.hop_s, copies=copies)
    return Scored(problem, schedule, result, offload=offload, copies=copies)


def time_of(problem: ScheduleProblem, schedule: Schedule) -> tuple[float, float]:
    """Makespan, then longest stage span: the sorting key of schedules of a problem."""
    result = score(problem, schedule).result
    return result.makespan, result.stage_span


def exceeds(scored: Scored) -> bool:
    """Whether a device exceeds the memory limit by more than rounding."""
    limit = scored.problem.memory_limit
    return limit is not None and max(scored.result.peak_memory) > limit * (1 + ROUNDING)


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
    for parameters in family.candidates_of(problem):
        schedule = family.built(problem, parameters)
        if schedule is not None:
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
        limit: of a device; None for no limit.
    """
    peaks = {peak_of(scored) for scored in frontier(found) if not scored.schedule.offload}
    return sorted(peaks if limit is None else {*peaks, limit})


def fastest(found: Sequence[Scored]) -> Scored:
    """The fastest schedule, of equally fast ones the one with the least memory."""
    return tradeoff.by_time(found, _makespan, peak_of)[0]


def _makespan(scored: Scored) -> float:
    return scored.result.makespan
