"""Interleaved 1F1B: 1F1B over several stages a device (Narayanan et al. 2021).

The microbatches go in rounds through a device's stages: a round's group of at least as many microbatches as there are
devices passes the first stage, then the second, so that it comes round to a device's next stage just when it has
passed this one. The bubble is 1F1B's divided by the number of chunks, for more saved tensors: device d holds at most
``(chunks − 1)·group + 2(devices − 1 − d) + 1`` stages' worth, where ``group`` is the largest.

A group of exactly as many microbatches as devices leaves no time for messages: at each change of stage, forward and
backward, the whole pipeline waits for ``devices`` hops. Larger groups hide that, for memory.
"""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any

from ..costs.costs import StageCosts
from ..errors import RequestError
from ..evaluate.reference import evaluate
from .looped import default_run_ahead, looped_order
from .placement import looped_placement
from .problem import Schedule, ScheduleFamily, ScheduleProblem

HIDE_HOPS_FROM_CHUNKS = 3
"""A choice between time and memory. With two chunks groups stay as small as published, and so does the memory; from
three on the 2(chunks − 1) waits at changes of stage are hidden, for ``(chunks − 1)(group − devices)`` stages' worth
more. ``rounds`` and a memory limit overrule it."""


def interleaved_1f1b(problem: ScheduleProblem, *, rounds: int | None = None) -> Schedule:
    """Interleaved 1F1B for any number of microbatches and chunks; with one chunk it is 1F1B.

    Args:
        problem: what to build it for. Where it has a memory limit, more and smaller groups are taken until one fits.
        rounds: groups of microbatches, as equal as can be; by default as many as hide the hops from three chunks on,
            else as many as leave each group at least one microbatch for every device. One more than that gives groups
            of exactly one for each and a last one of the rest: less memory, and a wait where the rest is small.

    Raises:
        RequestError: rounds below 1, or so many that groups are smaller than the number of devices.
    """
    most = -(-problem.microbatches // problem.devices)
    if rounds is None:
        return _first_that_fits(problem, sorted({_rounds_that_hide_hops(problem), _full_rounds(problem), most}))
    if not 1 <= rounds <= most:
        raise RequestError(
            f"{rounds} rounds of interleaved-1f1b: {problem.microbatches} microbatches on {problem.devices} devices "
            f"take 1 to {most}; use looped for smaller groups"
        )
    return _build(problem, rounds)


def _build(problem: ScheduleProblem, rounds: int) -> Schedule:
    p, m = problem.devices, problem.microbatches
    small, larger = divmod(m, rounds)
    sizes = [small + 1] * larger + [small] * (rounds - larger) if small >= p else [p] * rounds
    device_actions = looped_order(problem, sizes, default_run_ahead(problem, max(sizes)))
    parameters = f"chunks={problem.chunks}" + ("" if rounds * p == m else f",rounds={rounds}")
    return Schedule(
        f"interleaved-1f1b({parameters})", looped_placement(p, problem.chunks), problem.microbatches, device_actions
    )


def _full_rounds(problem: ScheduleProblem) -> int:
    """The most rounds whose groups have at least one microbatch for every device."""
    return max(problem.microbatches // problem.devices, 1)


def _rounds_that_hide_hops(problem: ScheduleProblem) -> int:
    """The most rounds whose groups are longer than a group's way around the devices, messages included."""
    costs = problem.costs or (StageCosts(1, 1, 1),)
    quickest = min(min(cost.forward_s, cost.full_backward_s) for cost in costs)
    if problem.chunks < HIDE_HOPS_FROM_CHUNKS or problem.hop_s == 0 or quickest == 0:
        return _full_rounds(problem)
    group = problem.devices + ceil(problem.devices * problem.hop_s / quickest)
    return max(problem.microbatches // group, 1)


def _first_that_fits(problem: ScheduleProblem, choices: list[int]) -> Schedule:
    """The schedule of the first number of rounds within the memory limit; else that of the last, which holds least."""
    if problem.chunks == 1 or problem.memory_limit is None:
        return _build(problem, choices[0])
    costs = problem.costs or (StageCosts(1, 1, 1, saved_bytes=1),) * problem.stages
    limit = problem.memory_limit * (1 + 1e-9)
    for rounds in choices:
        schedule = _build(problem, rounds)
        if max(evaluate(schedule.device_actions, schedule.placement, costs).peak_memory) <= limit:
            break
    return schedule


def _candidates(problem: ScheduleProblem) -> Iterable[Mapping[str, Any]]:
    """Rounds from the most down to one, halving: from least memory to best hidden messages."""
    if problem.chunks == 1:
        return ({},)
    full = _full_rounds(problem)
    choices = {-(-problem.microbatches // problem.devices), full, max(full - 1, 1), _rounds_that_hide_hops(problem)}
    while full > 1:
        full //= 2
        choices.add(full)
    return tuple({"rounds": rounds} for rounds in sorted(choices, reverse=True))


FAMILY = ScheduleFamily(
    "interleaved-1f1b",
    interleaved_1f1b,
    "1F1B over several stages a device (Megatron-LM)",
    usual_chunks=2,
    candidates=_candidates,
)
