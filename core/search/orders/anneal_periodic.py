"""Simulated annealing of a periodic order: one compiled loop, deterministic for its seed.

A move shifts one action of a device's pattern, and so the same action of every group of microbatches.
"""

from typing import Any

import numpy as np

from ...evaluate.coding import INFINITY, KINDS
from ...evaluate.compiled import peak, run, work_of
from ...numba_cache import njit
from ...schedules.construction.decode import TAIL
from ...schedules.construction.shifts import critical, metropolis
from .periodic import in_order, unroll


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
    seed: int, moves: int, temperature: float, target: float, count: int, group: int, placement: Any, costs: Any,
    limits: Any, ring: Any, turns: Any, orders: Any, lengths: Any, scratch: Any,
) -> tuple[float, int]:  # fmt: skip
    """Improve a pattern in place.

    Args:
        seed: of the random numbers.
        moves: number of patterns to try.
        temperature: the initial one, as a share of the makespan; it falls to 0.
        target: a makespan that ends the search.
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
    while tried < moves and best_span > target:
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
