"""The looped 1F1B family, with the parameters of Pfeife (ICML 2025).

- loops: stages that each device holds (the problem's chunks);
- microbatches per loop: how many microbatches go through one loop's stage before the device runs the next loop's;
- run ahead: how many forwards each device runs before its first backward; then one backward and one forward in turn.

GPipe, 1F1B and interleaved 1F1B are special cases. For two devices, two loops, four microbatches, two microbatches per
loop and five and three forwards run ahead, written as stage and microbatch::

    0  F00 F01 F20 F21 F02 B20 F03 B21 F22 B00 F23 B01 B22 B23 B02 B03
    1  F10 F11 F30 B30 F31 B31 F12 B10 F13 B11 F32 B32 F33 B33 B12 B13
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..actions import Action, Kind
from ..costs.costs import StageCosts
from ..errors import RequestError
from ..timing.orders import evaluate
from .construction.order import grouped, merge
from .problem import Schedule, ScheduleFamily, ScheduleProblem, looped_placement


def looped(
    problem: ScheduleProblem, *, microbatches_per_loop: int | None = None, run_ahead: Sequence[int] | None = None
) -> Schedule:
    """A looped 1F1B schedule.

    Args:
        problem: any number of devices, microbatches and chunks (the loops).
        microbatches_per_loop: at least 1; by default the number of devices, which keeps every device busy from the
            first loop to the second. A larger number than the microbatches means all of them.
        run_ahead: per device, at least 1; by default ``default_run_ahead``. In a last group that is not full the
            missing microbatches count. A larger number than the forwards means all of them (GPipe).

    Raises:
        RequestError: a parameter is below 1, ``run_ahead`` is not one per device, or the schedule would deadlock
            (the message shows the cycle).
    """
    group = problem.devices if microbatches_per_loop is None else microbatches_per_loop
    if group < 1:
        raise RequestError(f"the number of microbatches per loop is {group}: give at least 1")
    if microbatches_per_loop is not None:
        group = min(group, problem.microbatches)
    ahead = default_run_ahead(problem, group) if run_ahead is None else tuple(run_ahead)
    if len(ahead) != problem.devices:
        raise RequestError(
            f"run-ahead {_listed(ahead)} has {len(ahead)} numbers: give one for each of the {problem.devices} devices"
        )
    if min(ahead) < 1:
        raise RequestError(f"run-ahead {_listed(ahead)} has {min(ahead)}: at least one forward precedes a backward")
    device_actions = looped_order(problem, [group] * -(-problem.microbatches // group), ahead)
    if not _safe(problem, group, ahead):
        _refuse_deadlock(problem, ahead, device_actions)
    name = f"looped(loops={problem.chunks},microbatches_per_loop={group},run_ahead={_listed(ahead)})"
    placement = looped_placement(problem.devices, problem.chunks)
    return Schedule(name, placement, problem.microbatches, device_actions)


def looped_order(
    problem: ScheduleProblem, sizes: Sequence[int], ahead: Sequence[int]
) -> tuple[tuple[Action, ...], ...]:
    """The compute order of every device for groups of these sizes and ``ahead`` forwards run ahead."""
    device_actions = []
    for device in range(problem.devices):
        stages = range(device, problem.stages, problem.devices)
        forwards = grouped(stages, Kind.F, sizes)
        backwards = grouped(stages[::-1], Kind.B, sizes)
        device_actions.append(merge(forwards, backwards, ahead[device], problem.microbatches))
    return tuple(device_actions)


def default_run_ahead(problem: ScheduleProblem, group: int, slope: int | None = None) -> tuple[int, ...]:
    """Forwards run ahead that never deadlock: those of 1F1B with one loop, of interleaved 1F1B with more.

    The last device needs its whole first group up to its last stage. Each device before it runs ``slope`` more ahead
    (default 1 with one loop and 2 with more: a microbatch takes a slot to the next device, and a slot back), but the
    first at most ``2 × group`` more than the last: see ``_safe``.
    """
    step = slope if slope is not None else 1 if problem.chunks == 1 else 2
    last = problem.devices - 1
    most = step * last if problem.chunks == 1 else 2 * group
    base = (problem.chunks - 1) * group + 1
    return tuple(base + min(step * (last - device), most) for device in range(problem.devices))


def _safe(problem: ScheduleProblem, group: int, ahead: Sequence[int]) -> bool:
    """Whether counting alone proves that there is no deadlock.

    All devices run the same groups in the same order, so positions in the order can be compared between devices. A
    forward waits for the previous device at the same position, or for the previous loop ``group`` positions earlier; a
    backward likewise for the next device. A cycle of waits must gain positions. It gains only by passing from forwards
    of a device that runs less ahead to one that runs more ahead: that needs a change of loop both among forwards and
    among backwards, which costs ``2 × group``.
    """
    return (
        ahead[-1] > (problem.chunks - 1) * group
        and all(a >= b for a, b in pairwise(ahead))
        and (problem.chunks == 1 or ahead[0] - ahead[-1] <= 2 * group)
    )


def _refuse_deadlock(
    problem: ScheduleProblem, ahead: Sequence[int], device_actions: tuple[tuple[Action, ...], ...]
) -> None:
    placement = looped_placement(problem.devices, problem.chunks)
    try:
        evaluate(device_actions, placement, [StageCosts(1, 1, 1)] * problem.stages)
    except RequestError as error:
        raise RequestError(
            f"run-ahead {_listed(ahead)} cannot run: {error}; let later devices run further ahead, "
            "or the first ones less, or leave run-ahead out"
        ) from None


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _candidates(problem: ScheduleProblem) -> Iterable[Mapping[str, Any]]:
    """Groups from half the devices to all microbatches, each with little and with much run ahead."""
    p, m = problem.devices, problem.microbatches
    groups = sorted({min(max(group, 1), m) for group in (p // 2, p, 2 * p, m)}) if problem.chunks > 1 else [p]
    seen = set()
    for group in groups:
        for slope in (1, 2, 3):
            ahead = default_run_ahead(problem, group, slope)
            order = tuple(min(count, m * problem.chunks) for count in ahead)
            if (group, order) not in seen:
                seen.add((group, order))
                yield {"microbatches_per_loop": group, "run_ahead": ahead}


FAMILY = ScheduleFamily(
    "looped",
    looped,
    "looped 1F1B with microbatches per loop and forwards run ahead per device (Pfeife)",
    usual_chunks=2,
    candidates=_candidates,
)
