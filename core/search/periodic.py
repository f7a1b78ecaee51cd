"""Periodic orders, annealed: every device repeats one pattern of actions for each group of microbatches.

With little memory the period decides the makespan: the passes of a device have to fit into one period, and the memory
limits how long a microbatch is held (modulo scheduling: Rau 1994; the building blocks of Controllable Memory, arXiv
2405.15362, are patterns of one microbatch with equal slots). A pattern has few actions, so a few thousand moves find a
good one. Moves of single actions in the whole order would have to change every microbatch alike.

A pattern is a cyclic sequence of actions of the first group. Each has a turn: in repetition n the device runs it for
group n − turn. So the order of all microbatches, warm-up and cool-down included, follows from the pattern. A move of
annealing shifts one action of a device's pattern, and so the same action of every group of microbatches.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define

from ..numba_cache import njit
from ..schedules.construction.list_scheduler import TAIL, Instance
from ..schedules.construction.shifts import critical, metropolis
from ..timing.coding import FORWARD, INFINITY, INPUT, KINDS, WEIGHT, Floats, Integers
from ..timing.compiled import peak, run, work_of
from .problem.meter import Meter

GROUPS = (1, 2, 3, 4)
"""Numbers of microbatches in a pattern."""
STRETCH = 1.05
"""Factor between the periods that are tried until a pattern is within the memory limit."""
BELOW = 0.5
"""Periodic orders are tried up to this share of the memory of 1F1B."""
KEPT = 3
"""Number of periodic orders that are annealed further as orders."""
TEMPERATURE = 0.005
"""Of the annealing at its beginning, as a share of the makespan."""


@define(eq=False)
class PeriodicState:
    """A point of the search over periodic orders.

    Args:
        task: the instance.
        group: microbatches in the pattern.
        ring: per device the actions in the order of a repetition, as codes for ``group`` microbatches,
            (devices, 3 · chunks · group).
        turns: of the actions of ``ring``.
        orders, lengths: coded orders of all microbatches that follow from the pattern.
        makespan: of these orders once they are annealed.
    """

    task: Instance
    group: int
    ring: Integers
    turns: Integers
    orders: Integers
    lengths: Integers
    makespan: float = float("inf")


def periodic_orders(tasks: Sequence[Instance], evaluations: int, seed: int, meter: Meter) -> list[PeriodicState]:
    """The best periodic orders of instances whose memory is short, best first.

    Each round has an equal part of the evaluations, for a third of the states of the round before; ``meter`` counts the
    patterns tried.
    """
    left = [state for task in tasks if _is_short(task) for state in periodic_starts(task)]
    sizes = [len(left)]
    while sizes[-1] > KEPT:
        sizes.append(max(-(-sizes[-1] // 3), KEPT))
    for number, size in enumerate(sizes):
        left = left[:size]
        for place, state in enumerate(left):
            state.makespan, count = anneal_periodic(
                seed * 1_000_003 + number * 1009 + place, int(evaluations / len(sizes) / size), TEMPERATURE,
                state.task.problem.microbatches, state.group, *state.task.for_orders()[1:], state.ring, state.turns,
                state.orders, state.lengths, state.task.scratch(),
            )  # fmt: skip
            meter.spend(count)
        left = sorted(left, key=lambda state: state.makespan)
    return left


def _is_short(task: Instance) -> bool:
    """Whether the memory limit is at most half of what 1F1B holds: a microbatch for each device."""
    limit, problem = task.problem.memory_limit, task.problem
    return limit is not None and limit <= BELOW * problem.devices * task.least_memory * (1 + 1e-3)


def periodic_starts(task: Instance) -> list[PeriodicState]:
    """A pattern for each number of microbatches: every action is due as early as dependencies allow, and the period is
    the smallest tried one that is within the memory limit. Those that only whole backwards would fit are left out."""
    groups = sorted({min(group, task.problem.microbatches) for group in GROUPS})
    return [state for state in (_start(task, group) for group in groups) if state is not None]


def _start(task: Instance, group: int) -> PeriodicState | None:
    devices, count = task.problem.devices, task.problem.microbatches
    width = 3 * task.stages_on.shape[1]
    lengths = np.full(devices, width * count, dtype=np.int64)
    ring, turns, orders = (np.zeros((devices, width * size), dtype=np.int64) for size in (group, group, count))
    state = PeriodicState(task, group, ring, turns, orders, lengths)
    due = _due_times(task)
    longest = float((due + task.times).max())
    work = float(task.times.sum(axis=0)[task.stages_on].sum(axis=1).max())
    shortest = max(work, longest / count) or 1.0  # the second part limits the turns if delays are long

    def fits(steps: int) -> bool:
        for device, own in enumerate(task.stages_on.tolist()):
            _fill(ring[device], turns[device], due, own, group, shortest * STRETCH**steps)
        return bool(_fits(group, *task.for_orders(), ring, turns, orders, lengths, task.scratch()))

    if fits(0):
        return state
    low, high = 0, 1 + math.ceil(math.log(max(longest / shortest, 1.0)) / math.log(STRETCH))
    if not fits(high):  # with one microbatch at a time
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return state if fits(high) else None


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
def unroll(ring: Any, turns: Any, count: int, group: int, order: Any) -> int:
    """Fill a device's order of all microbatches from its pattern; return its length."""
    length = 0
    for repetition in range(turns.min(), -(-count // group) + turns.max()):
        for i in range(ring.shape[0]):
            code, first = ring[i], (repetition - turns[i]) * group
            place = code >> 2
            stage = place // group
            microbatch = first + place - stage * group
            if first >= 0 and microbatch < count:
                order[length] = KINDS * (stage * count + microbatch) + (code & 3)
                length += 1
    return length


@njit()
def in_order(order: Any, length: int, count: int, stage_of: Any, through: Any) -> bool:
    """Whether every stage runs its microbatches in order, each F before its I and W."""
    through[:] = 0
    for i in range(length):
        kind, place = order[i] & 3, order[i] >> 2
        stage = stage_of[place]
        microbatch = place - stage * count
        if through[kind, stage] != microbatch or (kind > 0 and through[kind - 1, stage] <= microbatch):
            return False
        through[kind, stage] += 1
    return True


@njit()
def _fits(
    group: int, count: int, placement: Any, costs: Any, limits: Any, ring: Any, turns: Any, orders: Any, lengths: Any,
    scratch: Any,
) -> bool:  # fmt: skip
    """Fill the orders of all devices; whether they are legal, end, and are within the limits."""
    through = np.zeros((3, placement.shape[0]), dtype=np.int64)
    for d in range(ring.shape[0]):
        lengths[d] = unroll(ring[d], turns[d], count, group, orders[d])
        if not in_order(orders[d], lengths[d], count, scratch.stage_of, through):
            return False
        if peak(orders[d], lengths[d], d, placement, costs, scratch.stage_of)[0] > limits[d]:
            return False
    return run(orders, lengths, count, placement, costs, np.zeros(ring.shape[0]), INFINITY, scratch) >= 0


@njit()
def _shift(ring: Any, turns: Any, start: int, reach: int) -> None:
    """Move the action at ``start`` later (earlier if ``reach`` is negative), past that many others of the cycle."""
    width, i = ring.shape[0], start
    step = 1 if reach > 0 else -1
    for _ in range(abs(reach)):
        j = (i + step) % width
        wrapped = step if (j - i) * step < 0 else 0
        ring[i], ring[j] = ring[j], ring[i]
        turns[i], turns[j] = turns[j] - wrapped, turns[i] + wrapped
        i = j


@njit()
def _draw(
    ring: Any, orders: Any, found: Any, number: int, count: int, group: int, stage_of: Any
) -> tuple[int, int, int]:
    """A device, a position in its pattern, and by how many positions its action should move.

    Mostly an action on the longest path.
    """
    reach = 1 + int(-1.5 * np.log(1 - np.random.random()))
    if np.random.random() < 0.5:
        reach = -reach
    if number == 0 or np.random.random() < 0.2:
        return np.random.randint(ring.shape[0]), np.random.randint(ring.shape[1]), reach
    pick = np.random.randint(number)
    d = found[pick, 0]
    code = orders[d, found[pick, 1]]
    stage = stage_of[code >> 2]
    wanted = KINDS * (stage * group + ((code >> 2) - stage * count) % group) + (code & 3)
    i = 0
    while ring[d, i] != wanted:
        i += 1
    return d, i, reach


@njit()
def anneal_periodic(
    seed: int, moves: int, temperature: float, count: int, group: int, placement: Any, costs: Any,
    limits: Any, ring: Any, turns: Any, orders: Any, lengths: Any, scratch: Any,
) -> tuple[float, int]:  # fmt: skip
    """Improve a pattern in place.

    Args:
        seed: of the random numbers.
        moves: number of patterns to try.
        temperature: the initial one, as a share of the makespan; it falls to 0.
        count: microbatches.
        group: microbatches in the pattern.
        placement, costs, limits: as in `local`.
        ring, turns: the pattern, as in ``PeriodicState``.
        orders, lengths: the orders that follow from it, which are within the limits.
        scratch: as in ``compiled.run``.

    Returns:
        The smallest makespan, and the number of patterns tried.
    """
    np.random.seed(seed)
    stage_of = scratch.stage_of
    through = np.zeros((3, placement.shape[0]), dtype=np.int64)
    work = np.empty(ring.shape[0])
    work_of(count, placement, costs, np.zeros(placement.shape[0], dtype=np.int64), work)  # all backwards are split
    found = np.empty((lengths.sum(), 2), dtype=np.int64)
    span = run(orders, lengths, count, placement, costs, work, INFINITY, scratch)
    value = span + TAIL * scratch.free.mean()
    number = critical(orders, lengths, placement, scratch, found)
    best, best_span, best_ring, best_turns, best_orders = value, span, ring.copy(), turns.copy(), orders.copy()
    old_ring, old_turns, old_order = ring[0].copy(), turns[0].copy(), orders[0].copy()
    tried = 0
    while tried < moves:
        tried += 1
        d, start, reach = _draw(ring, orders, found, number, count, group, stage_of)
        old_ring[:], old_turns[:], old_order[:] = ring[d], turns[d], orders[d]
        _shift(ring[d], turns[d], start, reach)
        unroll(ring[d], turns[d], count, group, orders[d])
        left = 1 - tried / moves
        threshold = metropolis(value, temperature * best * left * left) * (1 + 1e-12)
        new = INFINITY
        if (
            in_order(orders[d], lengths[d], count, stage_of, through)
            and peak(orders[d], lengths[d], d, placement, costs, stage_of)[0] <= limits[d]
        ):
            span = run(orders, lengths, count, placement, costs, work, threshold, scratch)
            if 0 <= span < INFINITY:
                new = span + TAIL * scratch.free.mean()
        if new > threshold:
            ring[d], turns[d], orders[d] = old_ring, old_turns, old_order
            continue
        value = new
        number = critical(orders, lengths, placement, scratch, found)
        if value < best:
            best, best_span = value, span
            best_ring[:], best_turns[:], best_orders[:] = ring, turns, orders
    ring[:], turns[:], orders[:] = best_ring, best_turns, best_orders
    return best_span, tried
