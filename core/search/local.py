"""Local search on the orders themselves: one action of a device earlier or later, chosen on the critical path.

Keys that a list scheduler decodes never let a device idle for what is not on its way yet, and some of the best orders
do: under little memory a forward is worth putting off. An order of its own can say that. A move is legal if a stage
still takes its microbatches in order and its F, I and W one after the other, and if the device holds no more than it
may, which the device's order alone decides; the longest path tells the time, and that nothing waits for itself. Moves
that cannot shorten the longest path are drawn seldom (van Laarhoven, Aarts and Lenstra, Job shop scheduling by
simulated annealing, 1992).
"""

from typing import Any

import numpy as np
from numba import njit

from ..schedules.decode import FORWARD, INFINITY, INPUT, TAIL, WEIGHT

UNKNOWN = -1


@njit(cache=True)
def _run(
    orders: Any, lengths: Any, count: int, stages: int, times: Any, hops: Any, stop: float, finish: Any, cause: Any,
    place: Any, free: Any,
) -> float:  # fmt: skip
    """The makespan and ``TAIL`` times the mean end; infinite where something waits for itself, or above ``stop``.

    Args:
        orders, lengths, count, times, hops: as in ``decode``.
        stages: how many.
        stop: give up above this.
        finish: filled with the end of every action.
        cause: filled with the action of another queue that it waited for, or ``UNKNOWN``.
        place, free: room for a number a device.
    """
    size = stages * count
    finish[:] = -1.0
    place[:] = 0
    free[:] = 0.0
    devices, left = orders.shape[0], lengths.sum()
    while left > 0:
        before = left
        for d in range(devices):
            i, now = place[d], free[d]
            while i < lengths[d]:
                code = orders[d, i]
                kind = code // size
                stage = (code - kind * size) // count
                at, why = now, UNKNOWN
                if kind == FORWARD:
                    if stage > 0:
                        end = finish[code - count]
                        if end < 0:
                            break
                        if end + hops[stage] > at:
                            at, why = end + hops[stage], code - count
                elif kind == INPUT:
                    end = finish[code - size]
                    if end < 0:
                        break
                    at = max(at, end)
                    if stage < stages - 1:
                        end = finish[code + count]
                        if end < 0:
                            break
                        if end + hops[stage + 1] > at:
                            at, why = end + hops[stage + 1], code + count
                elif finish[code - size] < 0:
                    break
                now = at + times[kind, stage]
                finish[code] = now
                cause[code] = why
                i += 1
                left -= 1
            place[d], free[d] = i, now
            if now > stop:
                return INFINITY
        if left == before:
            return INFINITY
    return float(free.max() + TAIL * free.mean())


@njit(cache=True)
def _fits(order: Any, length: int, count: int, stages: int, need: Any, kept: Any, fused: Any, limit: float) -> bool:
    """Whether a device in this order holds no more than it may."""
    size, held = stages * count, 0.0
    for i in range(length):
        kind = order[i] // size
        stage = (order[i] - kind * size) // count
        if kind == FORWARD:
            held += need[stage]
            if held > limit:
                return False
        elif kind == INPUT:
            held -= need[stage] if fused[stage] else need[stage] - kept[stage]
        else:
            held -= kept[stage]
    return True


@njit(cache=True)
def _move(order: Any, start: int, goal: int, count: int, stages: int) -> int:
    """Move the action at ``start`` towards ``goal``, as far as its own stage allows; returns where it is then."""
    size, code, i = stages * count, order[start], start
    kind = code // size
    stage = (code - kind * size) // count
    step = 1 if goal > start else -1
    while i != goal:
        other = order[i + step]
        there = other // size
        if (other - there * size) // count == stage and (there == kind or abs(other - code) == size):
            break  # a microbatch before or behind it, or what it reads or is read by
        order[i], order[i + step] = other, code
        i += step
    return i


@njit(cache=True)
def _critical(orders: Any, lengths: Any, count: int, stages: int, times: Any, finish: Any, cause: Any, found: Any) -> int:
    """Positions on the longest path whose action waited for the one in front of it on its device, into ``found``."""
    size, last, d = stages * count, -1.0, 0
    for device in range(orders.shape[0]):
        if lengths[device] > 0 and finish[orders[device, lengths[device] - 1]] > last:
            last, d = finish[orders[device, lengths[device] - 1]], device
    number, i = 0, lengths[d] - 1
    while True:
        code = orders[d, i]
        why = cause[code]
        if why != UNKNOWN:
            for device in range(orders.shape[0]):
                hit = -1
                for j in range(lengths[device]):
                    if orders[device, j] == why:
                        hit = j
                        break
                if hit >= 0:
                    d, i = device, hit
                    break
            continue
        if i == 0:
            return number
        if finish[orders[d, i - 1]] >= finish[code] - times[code // size, (code % size) // count] - 1e-9 * last:
            found[number, 0], found[number, 1] = d, i
            number += 1
        i -= 1


@njit(cache=True)
def improve(
    seed: int, moves: int, warmth: float, target: float, count: int, placement: Any, times: Any, hops: Any, need: Any,
    kept: Any, limits: Any, fused: Any, orders: Any, lengths: Any,
) -> tuple[float, int]:  # fmt: skip
    """Improve ``orders`` in place by simulated annealing; arguments from ``count`` on as in ``decode``.

    Args:
        seed: of the random numbers.
        moves: to try.
        warmth: the first temperature as a share of the makespan; it falls to nothing.
        target: a makespan that ends the search.

    Returns:
        The value of the order, and how many moves were tried.
    """
    np.random.seed(seed)
    stages, devices = placement.shape[0], orders.shape[0]
    finish, cause = np.empty(3 * stages * count), np.empty(3 * stages * count, dtype=np.int64)
    place, free = np.zeros(devices, dtype=np.int64), np.zeros(devices)
    found = np.empty((lengths.sum(), 2), dtype=np.int64)
    value = _run(orders, lengths, count, stages, times, hops, INFINITY, finish, cause, place, free)
    number = _critical(orders, lengths, count, stages, times, finish, cause, found)
    best, best_orders = value, orders.copy()
    row = np.empty(orders.shape[1], dtype=np.int64)
    tried = 0
    while tried < moves and best > target:
        tried += 1
        left = 1 - tried / moves
        reach = 1 + int(-2.0 * np.log(1 - np.random.random()))
        if number > 0 and np.random.random() < 0.8:
            pick = np.random.randint(number)
            d, i = found[pick, 0], found[pick, 1]
            if np.random.random() < 0.5:
                start, goal = i, max(i - reach, 0)
            else:
                start, goal = i - 1, min(i - 1 + reach, lengths[d] - 1)
        else:
            d = np.random.randint(devices)
            start = np.random.randint(lengths[d])
            goal = min(max(start + (reach if np.random.random() < 0.5 else -reach), 0), lengths[d] - 1)
        row[:] = orders[d]
        if _move(orders[d], start, goal, count, stages) == start:
            continue
        if not _fits(orders[d], lengths[d], count, stages, need, kept, fused, limits[d]):
            orders[d] = row
            continue
        enough = value - warmth * best * left * left * np.log(1 - np.random.random())
        new = _run(orders, lengths, count, stages, times, hops, enough * (1 + 1e-12), finish, cause, place, free)
        if new > enough * (1 + 1e-12):
            orders[d] = row
            continue
        value = new
        number = _critical(orders, lengths, count, stages, times, finish, cause, found)
        if value < best:
            best = value
            best_orders[:] = orders
    orders[:] = best_orders
    return best, tried
