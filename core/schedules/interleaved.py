"""Interleaved 1F1B: 1F1B with several stages per device (Narayanan et al. 2021).

The microbatches run in rounds: a group of at least as many microbatches as devices runs through a device's first stage,
then its second, so that the first of them reaches the device's next stage when the last has left this one. The bubble
is that of 1F1B divided by the number of chunks, at the cost of memory: device d holds saved tensors of at most
``(chunks − 1)·group + 2(devices − 1 − d) + 1`` stages, where ``group`` is the largest.

A group of exactly as many microbatches as devices leaves no time for messages: at each change of stage, forward and
backward, the whole pipeline waits for ``devices`` hops. Larger groups hide these at the cost of memory.
"""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any

from ..errors import RequestError
from .looped import default_run_ahead, looped_order
from .problem import Schedule, ScheduleFamily, ScheduleProblem, looped_placement
from .scored import costs_of, exceeds, score

HIDE_HOPS_FROM_CHUNKS = 3
"""A trade-off of time and memory. With two chunks the groups, and so the memory, are those of the paper. From three on
the 2(chunks − 1) waits at changes of stage are hidden, for saved tensors of ``(chunks − 1)(group − devices)`` more
stages. ``rounds`` and a memory limit override it."""


def interleaved_1f1b(problem: ScheduleProblem, *, rounds: int | None = None) -> Schedule:
    """Interleaved 1F1B for any number of microbatches and chunks; with one chunk it is 1F1B.

    Args:
        problem: with a memory limit, more and smaller groups are tried until the schedule fits.
        rounds: number of groups of microbatches, as equal as possible. By default the most that hide the hops, from
            three chunks on; else the most with at least one microbatch per device in each group. One more gives groups
            of exactly one per device and a last one with the rest: less memory, and a wait if the rest is small.

    Raises:
        RequestError: rounds below 1, or groups would be smaller than the number of devices.
    """
    most = -(-problem.microbatches // problem.devices)
    if rounds is None:
        return _first_that_fits(problem, sorted({_rounds_that_hide_hops(problem), _full_rounds(problem), most}))
    if not 1 <= rounds <= most:
        raise RequestError(
            f"rounds is {rounds}: interleaved-1f1b with {problem.microbatches} microbatches on {problem.devices} "
            f"devices has 1 to {most}; give one of these, or use looped for smaller groups"
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
    """The largest number of rounds whose groups have at least one microbatch for every device."""
    return max(problem.microbatches // problem.devices, 1)


def _rounds_that_hide_hops(problem: ScheduleProblem) -> int:
    """The largest number of rounds whose groups take longer than one pass around the devices, messages included."""
    quickest = min(min(cost.forward_s, cost.full_backward_s) for cost in costs_of(problem))
    if problem.chunks < HIDE_HOPS_FROM_CHUNKS or problem.hop_s == 0 or quickest == 0:
        return _full_rounds(problem)
    group = problem.devices + ceil(problem.devices * problem.hop_s / quickest)
    return max(problem.microbatches // group, 1)


def _first_that_fits(problem: ScheduleProblem, choices: list[int]) -> Schedule:
    """The schedule with the first number of rounds that fits the memory limit; else the last, which needs least."""
    if problem.chunks == 1 or problem.memory_limit is None:
        return _build(problem, choices[0])
    for rounds in choices:
        schedule = _build(problem, rounds)
        if not exceeds(score(problem, schedule)):
            break
    return schedule


def _candidates(problem: ScheduleProblem) -> Iterable[Mapping[str, Any]]:
    """Rounds from the most down to one, halving: from least memory to fewest waits for messages."""
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
