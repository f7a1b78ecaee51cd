"""Improving a published order for costs other than the equal ones of its paper, by moves of single actions.

A list scheduler never leaves a device idle for an action that is not about to become available. Some of the best orders
do: with little memory it can pay to delay a forward. A move shifts one action of a device, mostly one on the longest
path. It is legal if a stage still runs its microbatches in order, with F before I before W, and if the device holds no
more than before. The longest path gives the time and detects deadlocks.
"""

from typing import Any

import numpy as np
from attrs import evolve

from ...actions import Kind
from ...numba_cache import is_interpreted, njit
from ...timing.coding import INFINITY, encode
from ...timing.compiled import count_whole, peak, run, work_of
from ..problem import Schedule, ScheduleProblem
from ..scored import ROUNDING, costs_of, score
from .list_scheduler import TAIL, instance
from .shifts import (
    critical,
    draw_in_pattern,
    draw_shift,
    in_order,
    metropolis,
    no_pattern,
    shift,
    shift_in_pattern,
    unroll,
)

MOVES = 20_000
"""Moves tried of each kind of walk."""
EFFORT = 5_000_000
"""Upper bound of moves × actions of each walk: some hundredths of a second."""
LEAST_MOVES = 1_000
"""Smallest number of moves for which a walk is run: fewer find nothing in a large order."""
MOVES_FOR_ANNEALING = 2_000
"""Smallest number of moves for which annealing is run after descent: with fewer, descent finds nearly as much."""
TEMPERATURES = (0.0, 0.0005)
"""Initial temperatures of annealing, as shares of the makespan: pure descent, and about the cost of a hop."""


def polish(problem: ScheduleProblem, schedule: Schedule) -> Schedule:
    """Move single actions where that shortens the makespan; no device holds more than before.

    With stages of equal times and messages without delay the order is returned unchanged, and where functions are
    interpreted.
    """
    costs = costs_of(problem)
    times = {t for cost in costs for t in (cost.forward_s, cost.backward_input_s, cost.backward_weight_s)}
    moves = min(MOVES, EFFORT // max(sum(map(len, schedule.device_actions)), 1))
    if (len(times) == 1 and not problem.hop_s) or moves < LEAST_MOVES or is_interpreted():
        return schedule
    before = score(problem, schedule).result
    task = evolve(instance(problem, schedule.placement), limits=np.array(before.peak_memory) * (1 + ROUNDING))
    # In a stage with split and unsplit backwards all are split: each B becomes I followed by W.
    split = {action.stage for order in schedule.device_actions for action in order if action.kind is Kind.I}
    best, least, scratch, none = schedule, before.makespan, task.scratch(), no_pattern(problem.devices)
    for temperature in TEMPERATURES if moves >= MOVES_FOR_ANNEALING else TEMPERATURES[:1]:
        orders, lengths = encode(schedule.device_actions, schedule.microbatches, split=split)
        makespan = improve(0, moves, temperature, *task.for_orders(), orders, lengths, scratch, none)
        if makespan < least:
            best, least = task.schedule(schedule.name, orders, lengths), makespan
    return best


@njit(inline="always")
def _value(makespan: float, scratch: Any) -> float:
    """Makespan + ``TAIL`` · mean end; infinite if the order is invalid."""
    return makespan + TAIL * scratch.free.mean() if 0 <= makespan < INFINITY else INFINITY


@njit()
def improve(
    seed: int,
    moves: int,
    temperature: float,
    count: int,
    placement: Any,
    costs: Any,
    limits: Any,
    orders: Any,
    lengths: Any,
    scratch: Any,
    pattern: Any,
) -> float:
    """Improve ``orders`` in place by simulated annealing.

    Args:
        temperature: the initial temperature as a share of the makespan; it falls to 0.
        costs: ``compiled.StageArrays``.
        limits: bytes that each device may hold.
        orders, lengths, scratch: as in ``compiled.run``.
        pattern: from which the orders follow, improved with them; ``no_pattern`` to move single actions.

    Returns:
        The makespan of the best order (with the smallest mean end among equals). Infinite if the given order exceeds a
        limit: moves keep each other device as it is.
    """
    for d in range(orders.shape[0]):
        if peak(orders[d], lengths[d], d, placement, costs, scratch.stage_of) > limits[d]:
            return INFINITY
    np.random.seed(seed)
    stage_of, ring, turns = scratch.stage_of, pattern.ring, pattern.turns
    whole, work = np.empty(placement.shape[0], dtype=np.int64), np.empty(orders.shape[0])
    through = np.empty((3, placement.shape[0]), dtype=np.int64)
    count_whole(orders, lengths, stage_of, whole)
    work_of(count, placement, costs, whole, work)
    found = np.empty((lengths.sum(), 2), dtype=np.int64)
    span = run(orders, lengths, count, placement, costs, work, INFINITY, scratch)
    value = _value(span, scratch)
    number = critical(orders, lengths, placement, scratch, found)
    best, best_span, best_orders, best_ring, best_turns = value, span, orders.copy(), ring.copy(), turns.copy()
    row, old_ring, old_turns = orders[0].copy(), ring[0].copy(), turns[0].copy()
    for tried in range(1, moves + 1):
        legal = True
        if pattern.group > 0:
            d, start, reach = draw_in_pattern(pattern, orders, found, number, count, stage_of)
            row[:], old_ring[:], old_turns[:] = orders[d], ring[d], turns[d]
            shift_in_pattern(ring[d], turns[d], start, reach)
            unroll(pattern, d, count, orders[d])
            legal = in_order(orders[d], lengths[d], count, stage_of, through)
        else:
            d, start, goal = draw_shift(lengths, found, number)
            row[:] = orders[d]
            if shift(orders[d], start, goal, stage_of) == start:
                continue
        left = 1 - tried / moves
        threshold = metropolis(value, temperature * best * left * left) * (1 + 1e-12)
        new = INFINITY
        if legal and peak(orders[d], lengths[d], d, placement, costs, stage_of) <= limits[d]:
            span = run(orders, lengths, count, placement, costs, work, threshold, scratch)
            new = _value(span, scratch)
        if new > threshold:
            orders[d], ring[d], turns[d] = row, old_ring, old_turns
            continue
        value = new
        number = critical(orders, lengths, placement, scratch, found)
        if value < best:
            best, best_span = value, span
            best_orders[:], best_ring[:], best_turns[:] = orders, ring, turns
    orders[:], ring[:], turns[:] = best_orders, best_ring, best_turns
    return best_span
