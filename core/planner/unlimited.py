"""What the memory limit costs a plan: the fastest known order of its own stages that lacks nothing but memory."""

from collections.abc import Iterable, Sequence

from attrs import evolve

from ..plan import Plan
from ..schedules.problem import ScheduleFamily
from .options import options, schedule_problem
from .score import Oracle


def unlimited_step_s(
    plan: Plan, families: Iterable[ScheduleFamily], oracle: Oracle, limits: Sequence[float]
) -> float | None:
    """The shortest step of all schedules of these stages that do not fit; None where none is shorter than the plan's.

    Args:
        plan: a plan with its prediction, by the same oracle.
        families: the schedules to build, those that place the stages as the plan does.
        oracle: scores each.
        limits: bytes that each device may hold.
    """
    prediction = plan.prediction
    assert prediction is not None
    free = schedule_problem(
        prediction.cluster,
        plan.microbatches,
        placement=plan.placement,
        costs=prediction.costs,
        edges=plan.edges,
        limits=[float("inf")] * plan.devices,
    )
    best, seen = prediction.step_s, {plan.device_actions}
    for option in options(families, evolve(free, memory_limit=None)):
        if option.placement(plan.devices) != plan.placement:
            continue
        schedule = option.build(free)
        if schedule is None or schedule.device_actions in seen:
            continue
        seen.add(schedule.device_actions)
        score = oracle(evolve(plan, device_actions=schedule.device_actions), prediction.costs, prediction.cluster)
        fits = all(peak <= limit for peak, limit in zip(score.peak_memory_bytes, limits, strict=True))
        if not fits:
            best = min(best, score.step_s)
    return best if best < prediction.step_s else None
