"""Local search on the orders themselves: one action of a device earlier or later, chosen on the critical path.

Keys that a list scheduler decodes never let a device idle for what is not on its way yet, and some of the best orders
do: under little memory a forward is worth putting off. An order of its own can say that. A move is legal if a stage
still takes its microbatches in order and its F, I and W one after the other, and if the device holds no more than it
may, which the device's order alone decides; the longest path gives the time, and whether an action waits for itself.
"""

from typing import Any

import numpy as np

from ..evaluate.coding import INFINITY
from ..evaluate.compiled import count_whole, peak, run, work_of
from ..numba_cache import njit
from .decode import TAIL
from .shifts import critical, draw_shift, metropolis, shift


@njit(inline="always")
def _value(makespan: float, room: Any) -> float:
    """The makespan with ``TAIL`` times the mean end; infinite where there is none."""
    return makespan + TAIL * room.free.mean() if 0 <= makespan < INFINITY else INFINITY


@njit()
def improve(
    seed: int,
    moves: int,
    warmth: float,
    target: float,
    count: int,
    placement: Any,
    costs: Any,
    limits: Any,
    orders: Any,
    lengths: Any,
    room: Any,
) -> tuple[float, int]:
    """Improve ``orders`` in place by simulated annealing.

    Args:
        seed: of the random numbers.
        moves: to try.
        warmth: the first temperature as a share of the makespan; it falls to nothing.
        target: a makespan that ends the search.
        count: microbatches.
        placement: device of every stage.
        costs: ``compiled.StageArrays``.
        limits: bytes that each device may hold.
        orders, lengths, room: as in ``compiled.run``.

    Returns:
        The makespan of the best order, which has the least mean end among those; and how many moves were tried.
    """
    np.random.seed(seed)
    whole, work = np.empty(placement.shape[0], dtype=np.int64), np.empty(orders.shape[0])
    count_whole(orders, lengths, room.stage_of, whole)
    work_of(count, placement, costs, whole, work)
    found = np.empty((lengths.sum(), 2), dtype=np.int64)
    span = run(orders, lengths, count, placement, costs, work, INFINITY, room)
    value = _value(span, room)
    number = critical(orders, lengths, placement, room, found)
    best, best_span, best_orders = value, span, orders.copy()
    row = np.empty(orders.shape[1], dtype=np.int64)
    tried = 0
    while tried < moves and best_span > target:
        tried += 1
        d, start, goal = draw_shift(lengths, found, number)
        row[:] = orders[d]
        if shift(orders[d], start, goal, room.stage_of) == start:
            continue
        left = 1 - tried / moves
        enough = metropolis(value, warmth * best * left * left) * (1 + 1e-12)
        new = INFINITY
        if peak(orders[d], lengths[d], d, placement, costs, room.stage_of)[0] <= limits[d]:
            span = run(orders, lengths, count, placement, costs, work, enough, room)
            new = _value(span, room)
        if new > enough:
            orders[d] = row
            continue
        value = new
        number = critical(orders, lengths, placement, room, found)
        if value < best:
            best, best_span = value, span
            best_orders[:] = orders
    orders[:] = best_orders
    return best_span, tried


@njit()
def makespan_of(count: int, placement: Any, costs: Any, limits: Any, orders: Any, lengths: Any, room: Any) -> float:
    """The makespan of orders, and the end of every action into ``room``; arguments as in ``improve``.

    Infinite where something waits for itself, or a device holds more than it may.
    """
    work = np.zeros(orders.shape[0])  # only a bound before the run's end, and none is needed
    for d in range(orders.shape[0]):
        if peak(orders[d], lengths[d], d, placement, costs, room.stage_of)[0] > limits[d]:
            return INFINITY
    makespan = run(orders, lengths, count, placement, costs, work, INFINITY, room)
    return makespan if makespan >= 0 else INFINITY
