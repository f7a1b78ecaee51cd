"""Periodic orders: every device repeats one pattern of actions for each group of microbatches.

With little memory the period decides the makespan: the passes of a device have to fit into one period, and the memory
limits how long a microbatch is held (modulo scheduling: Rau 1994; the building blocks of Controllable Memory, arXiv
2405.15362, are patterns of one microbatch with equal slots). A pattern has few actions, so a few thousand moves find a
good one (`polish.improve`). Moves of single actions in the whole order would have to change every microbatch alike.
"""

import math
from typing import Any

import numpy as np
from attrs import define

from ...numba_cache import njit
from ...timing.coding import FORWARD, INFINITY, INPUT, KINDS, WEIGHT, Floats, Integers
from ...timing.compiled import peak, run
from .list_scheduler import Instance
from .polish import improve
from .shifts import Pattern, in_order, unroll

GROUPS = (1, 2, 3, 4)
"""Numbers of microbatches in a pattern."""
STRETCH = 1.05
"""Factor between the periods that are tried until a pattern is within the memory limit."""


@define(eq=False)
class PeriodicOrders:
    """Orders that follow from a pattern.

    Args:
        task: the instance.
        pattern: all backwards are split.
        orders, lengths: coded orders of all microbatches.
        makespan: of these orders once they are improved.
    """

    task: Instance
    pattern: Pattern
    orders: Integers
    lengths: Integers
    makespan: float = INFINITY

    def improve(self, seed: int, moves: int, temperature: float) -> None:
        """Anneal the pattern, and with it the orders."""
        task, scratch = self.task, self.task.scratch()
        self.makespan = improve(
            seed, moves, temperature, *task.for_orders(), self.orders, self.lengths, scratch, self.pattern
        )


def periodic_starts(task: Instance) -> list[PeriodicOrders]:
    """A pattern for each number of microbatches: every action is due as early as dependencies allow, and the period is
    the smallest tried one that is within the memory limit. Those that only whole backwards would fit are left out."""
    groups = sorted({min(group, task.problem.microbatches) for group in GROUPS})
    return [found for found in (_start(task, group) for group in groups) if found is not None]


def _start(task: Instance, group: int) -> PeriodicOrders | None:
    devices, count = task.problem.devices, task.problem.microbatches
    width = 3 * task.stages_on.shape[1]
    lengths = np.full(devices, width * count, dtype=np.int64)
    ring, turns, orders = (np.zeros((devices, width * size), dtype=np.int64) for size in (group, group, count))
    pattern = Pattern(group, ring, turns)
    due = _due_times(task)
    longest = float((due + task.times).max())
    work = float(task.times.sum(axis=0)[task.stages_on].sum(axis=1).max())
    shortest = max(work, longest / count) or 1.0  # the second part limits the turns if delays are long

    def fits(steps: int) -> bool:
        for device, own in enumerate(task.stages_on.tolist()):
            _fill(ring[device], turns[device], due, own, group, shortest * STRETCH**steps)
        return bool(_fits(pattern, *task.for_orders(), orders, lengths, task.scratch()))

    low, high = -1, 1 + math.ceil(math.log(max(longest / shortest, 1.0)) / math.log(STRETCH))
    if fits(0):
        high = 0
    elif not fits(high):  # with one microbatch at a time
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return PeriodicOrders(task, pattern, orders, lengths) if fits(high) else None


def _due_times(task: Instance) -> Floats:
    """When F, I and W of the first microbatch start if no device is shared, (3, stages)."""
    forward, back = task.times[FORWARD], task.times[INPUT]
    ends = np.cumsum(forward + task.hops)
    turned = ends[-1] + np.cumsum((back + np.append(task.hops[1:], 0.0))[::-1])[::-1]
    return np.stack([ends - forward, turned - back, turned])


def _fill(ring: Integers, turns: Integers, due: Floats, own: list[int], group: int, period: float) -> None:
    """The pattern of one device, if a microbatch starts every ``period``."""
    found = []
    for stage in own:
        for kind in (FORWARD, INPUT, WEIGHT):
            for microbatch in range(group):
                turn, at = divmod(float(due[kind, stage]) + microbatch * period, group * period)
                found.append((at, int(turn), KINDS * (stage * group + microbatch) + kind))
    for place, (_, turn, code) in enumerate(sorted(found)):
        ring[place], turns[place] = code, turn


@njit()
def _fits(
    pattern: Any, count: int, placement: Any, costs: Any, limits: Any, orders: Any, lengths: Any, scratch: Any
) -> bool:
    """Fill the orders of all devices; whether they are legal, end, and are within the limits."""
    through = np.zeros((3, placement.shape[0]), dtype=np.int64)
    for d in range(orders.shape[0]):
        lengths[d] = unroll(pattern, d, count, orders[d])
        if not in_order(orders[d], lengths[d], count, scratch.stage_of, through):
            return False
        if peak(orders[d], lengths[d], d, placement, costs, scratch.stage_of) > limits[d]:
            return False
    return run(orders, lengths, count, placement, costs, np.zeros(orders.shape[0]), INFINITY, scratch) >= 0
