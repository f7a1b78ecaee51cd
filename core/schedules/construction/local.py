"""Local search on orders: move one action of a device earlier or later, mostly on the critical path.

A list scheduler never leaves a device idle for an action that is not about to become available. Some of the best orders
do: with little memory it can pay to delay a forward. Explicit orders can express this. A move is legal if a stage still
runs its microbatches in order, with F before I before W, and if the device stays within its memory limit, which depends
on its order only. The longest path gives the time and detects deadlocks.
"""

from typing import Any

import numpy as np

from ...numba_cache import njit
from ...timing.coding import INFINITY
from ...timing.compiled import count_whole, peak, run, work_of
from .decode import TAIL
from .shifts import critical, draw_shift, metropolis, shift


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
) -> float:
    """Improve ``orders`` in place by simulated annealing.

    Args:
        seed: of the random numbers.
        moves: how many to try.
        temperature: the initial temperature as a share of the makespan; it falls to 0.
        count: microbatches.
        placement: device of every stage.
        costs: ``compiled.StageArrays``.
        limits: bytes that each device may hold.
        orders, lengths, scratch: as in ``compiled.run``.

    Returns:
        The makespan of the best order (with the smallest mean end among equals). Infinite if the given order exceeds a
        limit: moves keep each other device as it is.
    """
    for d in range(orders.shape[0]):
        if peak(orders[d], lengths[d], d, placement, costs, scratch.stage_of)[0] > limits[d]:
            return INFINITY
    np.random.seed(seed)
    whole, work = np.empty(placement.shape[0], dtype=np.int64), np.empty(orders.shape[0])
    count_whole(orders, lengths, scratch.stage_of, whole)
    work_of(count, placement, costs, whole, work)
    found = np.empty((lengths.sum(), 2), dtype=np.int64)
    span = run(orders, lengths, count, placement, costs, work, INFINITY, scratch)
    value = _value(span, scratch)
    number = critical(orders, lengths, placement, scratch, found)
    best, best_span, best_orders = value, span, orders.copy()
    row = np.empty(orders.shape[1], dtype=np.int64)
    for tried in range(1, moves + 1):
        d, start, goal = draw_shift(lengths, found, number)
        row[:] = orders[d]
        if shift(orders[d], start, goal, scratch.stage_of) == start:
            continue
        left = 1 - tried / moves
        threshold = metropolis(value, temperature * best * left * left) * (1 + 1e-12)
        new = INFINITY
        if peak(orders[d], lengths[d], d, placement, costs, scratch.stage_of)[0] <= limits[d]:
            span = run(orders, lengths, count, placement, costs, work, threshold, scratch)
            new = _value(span, scratch)
        if new > threshold:
            orders[d] = row
            continue
        value = new
        number = critical(orders, lengths, placement, scratch, found)
        if value < best:
            best, best_span = value, span
            best_orders[:] = orders
    orders[:] = best_orders
    return best_span
