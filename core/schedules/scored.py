"""Schedules with their evaluated time and memory."""

from collections.abc import Sequence

from attrs import frozen

from ..costs.costs import StageCosts
from ..plan.memory_policy import TimedCopy
from ..timing.orders import Evaluation, evaluate
from .problem import Schedule, ScheduleProblem

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
        copies: per device its copies to the host; empty if the schedule does not offload.
    """

    problem: ScheduleProblem
    schedule: Schedule
    result: Evaluation
    evaluations: int = 1
    bound: float | None = None
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
    copies = _copies(problem, schedule, costs) if schedule.offload else ()
    result = evaluate(schedule.device_actions, schedule.placement, costs, hop_s=problem.hop_s, copies=copies)
    return Scored(problem, schedule, result, copies=copies)


def _copies(problem: ScheduleProblem, schedule: Schedule, costs: Sequence[StageCosts]) -> list[list[TimedCopy]]:
    from ..offload.schedule_copies import schedule_copies  # here: most schedules need none

    return schedule_copies(
        schedule.device_actions, schedule.placement, costs, schedule.offload, hop_s=problem.hop_s,
        copy_s_per_byte=problem.copy_s_per_byte,
    )  # fmt: skip


def time_of(problem: ScheduleProblem, schedule: Schedule) -> tuple[float, float]:
    """Makespan, then longest stage span: the sorting key of schedules of a problem."""
    result = score(problem, schedule).result
    return result.makespan, result.stage_span


def exceeds(scored: Scored) -> bool:
    """Whether a device exceeds the memory limit by more than rounding."""
    limit = scored.problem.memory_limit
    return limit is not None and max(scored.result.peak_memory) > limit * (1 + ROUNDING)
