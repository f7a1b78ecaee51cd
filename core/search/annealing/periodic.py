"""Periodic orders: every device repeats one pattern of actions for each group of microbatches.

With little memory the period decides the step: the passes of a device have to fit into one period, and the memory
limits how long a microbatch is held (modulo scheduling: Rau 1994; the building blocks of Controllable Memory, arXiv
2405.15362, are patterns of one microbatch with equal slots).

A pattern is a cyclic sequence of actions of the first group. Each has a turn: in repetition n the device runs it for
group n − turn. So the order of all microbatches, warm-up and cool-down included, follows from the pattern.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...numba_cache import njit
from ...schedules.construction.list_scheduler import Instance
from ...timing.coding import FORWARD, INFINITY, INPUT, KINDS, WEIGHT, Floats, Integers
from ...timing.compiled import peak, run

GROUPS = (1, 2, 3, 4)
"""Numbers of microbatches in a pattern."""
STRETCH = 1.05
"""Factor between the periods that are tried until a pattern is within the memory limit."""


def periodic_orders(task: Instance) -> Iterator[tuple[Integers, Integers]]:
    """Coded orders and their lengths for each number of microbatches in a pattern: every action is due as early as
    dependencies allow, and the period is the smallest tried one that is within the memory limits. Those that only
    whole backwards would fit are left out."""
    for group in sorted({min(group, task.problem.microbatches) for group in GROUPS}):
        found = _order(task, group)
        if found is not None:
            yield found


def _order(task: Instance, group: int) -> tuple[Integers, Integers] | None:
    count, width = task.problem.microbatches, 3 * task.stages_on.shape[1]
    orders = np.zeros((task.problem.devices, width * count), dtype=np.int64)
    lengths = np.full(task.problem.devices, width * count, dtype=np.int64)
    due = _due_times(task)
    longest = float((due + task.times).max())
    work = float(task.times.sum(axis=0)[task.stages_on].sum(axis=1).max())
    shortest = max(work, longest / count) or 1.0  # the second part limits the turns if delays are long
    scratch, given = task.scratch(), task.for_orders()

    def fits(steps: int) -> bool:
        patterns = [_pattern(due, own, group, shortest * STRETCH**steps) for own in task.stages_on.tolist()]
        return bool(_fill(group, *given, np.array(patterns, dtype=np.int64), orders, lengths, scratch))

    if fits(0):
        return orders, lengths
    low, high = 0, 1 + math.ceil(math.log(max(longest / shortest, 1.0)) / math.log(STRETCH))
    if not fits(high):  # with one microbatch at a time
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return (orders, lengths) if fits(high) else None


def _due_times(task: Instance) -> Floats:
    """When F, I and W of the first microbatch start if no device is shared, (3, stages)."""
    forward, back = task.times[FORWARD], task.times[INPUT]
    ends = np.cumsum(forward + task.hops)
    turned = ends[-1] + np.cumsum((back + np.append(task.hops[1:], 0.0))[::-1])[::-1]
    return np.stack([ends - forward, turned - back, turned])


def _pattern(due: Floats, own: list[int], group: int, period: float) -> list[tuple[int, int]]:
    """Turns and codes (for ``group`` microbatches) of one device, if a microbatch starts every ``period``."""
    found = []
    for stage in own:
        for kind in (FORWARD, INPUT, WEIGHT):
            for microbatch in range(group):
                turn, at = divmod(float(due[kind, stage]) + microbatch * period, group * period)
                found.append((at, int(turn), KINDS * (stage * group + microbatch) + kind))
    return [(turn, code) for _, turn, code in sorted(found)]


@njit()
def _fill(
    group: int, count: int, placement: Any, costs: Any, limits: Any, patterns: Any, orders: Any, lengths: Any,
    scratch: Any,
) -> bool:  # fmt: skip
    """Fill the orders of all devices from their patterns; whether they are legal, end, and are within the limits."""
    for d in range(orders.shape[0]):
        through = np.zeros((3, placement.shape[0]), dtype=np.int64)
        turns, length = patterns[d, :, 0], 0
        for repetition in range(turns.min(), -(-count // group) + turns.max()):
            for i in range(turns.shape[0]):
                kind, place, first = patterns[d, i, 1] & 3, patterns[d, i, 1] >> 2, (repetition - turns[i]) * group
                stage = place // group
                microbatch = first + place - stage * group
                if first < 0 or microbatch >= count:
                    continue
                if through[kind, stage] != microbatch or (kind > 0 and through[kind - 1, stage] <= microbatch):
                    return False
                through[kind, stage] += 1
                orders[d, length] = KINDS * (stage * count + microbatch) + kind
                length += 1
        lengths[d] = length
        if peak(orders[d], length, d, placement, costs, scratch.stage_of)[0] > limits[d]:
            return False
    return run(orders, lengths, count, placement, costs, np.zeros(orders.shape[0]), INFINITY, scratch) >= 0
