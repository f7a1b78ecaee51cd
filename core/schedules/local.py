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

from ..evaluate.coding import FORWARD, INFINITY, INPUT
from ..numba_cache import njit
from .decode import TAIL

UNKNOWN = -1


@njit(inline="always")
def _begin(
    code: int, kind: int, stage: int, now: float, stages: int, count: int, hops: Any, finish: Any
) -> tuple[float, int]:
    """When an action can begin on a device that is free ``now``, and the action elsewhere that it waits for.

    Negative where something that it reads has not run yet.
    """
    size, source, hop = stages * count, UNKNOWN, 0.0
    if kind != FORWARD and finish[code - size] < 0:
        return -1.0, UNKNOWN
    if kind == FORWARD and stage > 0:
        source, hop = code - count, hops[stage]
    elif kind == INPUT and stage < stages - 1:
        source, hop = code + count, hops[stage + 1]
    if source == UNKNOWN:
        return now, UNKNOWN
    if finish[source] < 0:
        return -1.0, UNKNOWN
    at = finish[source] + hop
    return (at, source) if at > now else (now, UNKNOWN)


@njit()
def _run(
    orders: Any, lengths: Any, count: int, stages: int, times: Any, hops: Any, stop: float, finish: Any, cause: Any,
    place: Any, free: Any,
) -> tuple[float, float]:  # fmt: skip
    """The longest path.

    Args:
        orders, lengths, count, times, hops: as in ``decode``.
        stages: how many.
        stop: give up above this.
        finish: filled with the end of every action.
        cause: filled with the action elsewhere that it waited for, or ``UNKNOWN``.
        place, free: room for a number a device.

    Returns:
        The makespan with ``TAIL`` times the mean end, and alone; infinite above ``stop``, or where something waits for
        itself.
    """
    size = stages * count
    finish[:] = -1.0
    place[:] = 0
    free[:] = 0.0
    left = lengths.sum()
    while left > 0:
        before = left
        for d in range(orders.shape[0]):
            i, now = place[d], free[d]
            while i < lengths[d]:
                code = orders[d, i]
                kind = code // size
                stage = (code - kind * size) // count
                at, why = _begin(code, kind, stage, now, stages, count, hops, finish)
                if at < 0:
                    break
                now = at + times[kind, stage]
                finish[code] = now
                cause[code] = why
                i += 1
                left -= 1
            place[d], free[d] = i, now
            if now > stop:
                return INFINITY, INFINITY
        if left == before:
            return INFINITY, INFINITY
    return free.max() + TAIL * free.mean(), free.max()


@njit()
def _fits(order: Any, length: int, count: int, stages: int, saved: Any, kept: Any, fused: Any, limit: float) -> bool:
    """Whether a device in this order holds no more than it may, also after an I that leaves more than F saved."""
    size, held = stages * count, 0.0
    for i in range(length):
        kind = order[i] // size
        stage = (order[i] - kind * size) // count
        if kind == FORWARD:
            held += saved[stage]
        elif kind == INPUT:
            held -= saved[stage] if fused[stage] else saved[stage] - kept[stage]
        else:
            held -= kept[stage]
        if held > limit:
            return False
    return True


@njit()
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


@njit()
def _critical(orders: Any, lengths: Any, count: int, placement: Any, finish: Any, cause: Any, found: Any) -> int:
    """Positions on the longest path whose action waited for the one in front of it on its device, into ``found``."""
    size, last, d = placement.shape[0] * count, -1.0, 0
    for device in range(orders.shape[0]):
        if lengths[device] > 0 and finish[orders[device, lengths[device] - 1]] > last:
            last, d = finish[orders[device, lengths[device] - 1]], device
    number, i = 0, lengths[d] - 1
    while True:
        code = orders[d, i]
        why = cause[code]
        if why != UNKNOWN:
            d = placement[(why % size) // count]
            i = 0
            while orders[d, i] != why:
                i += 1
        elif i == 0:
            return number
        else:
            found[number, 0], found[number, 1] = d, i
            number += 1
            i -= 1


@njit()
def some_move(lengths: Any, found: Any, number: int) -> tuple[int, int, int]:
    """A device, and a position there and where its action is to go."""
    reach = 1 + int(-2.0 * np.log(1 - np.random.random()))
    if number > 0 and np.random.random() < 0.8:
        pick = np.random.randint(number)
        d, i = found[pick, 0], found[pick, 1]
        if np.random.random() < 0.5:
            return d, i, max(i - reach, 0)
        return d, i - 1, min(i - 1 + reach, lengths[d] - 1)
    d = np.random.randint(lengths.shape[0])
    start = np.random.randint(lengths[d])
    return d, start, min(max(start + (reach if np.random.random() < 0.5 else -reach), 0), lengths[d] - 1)


@njit()
def improve(
    seed: int, moves: int, warmth: float, target: float, count: int, placement: Any, times: Any, hops: Any, saved: Any,
    kept: Any, limits: Any, fused: Any, orders: Any, lengths: Any,
) -> tuple[float, int]:  # fmt: skip
    """Improve ``orders`` in place by simulated annealing; arguments from ``count`` on as in ``decode``, but for
    ``saved``: what F leaves, with nothing kept back for I.

    Args:
        seed: of the random numbers.
        moves: to try.
        warmth: the first temperature as a share of the makespan; it falls to nothing.
        target: a makespan that ends the search.

    Returns:
        The makespan of the best order, which has the least mean end among those; and how many moves were tried.
    """
    np.random.seed(seed)
    stages, devices = placement.shape[0], orders.shape[0]
    finish, cause = np.empty(3 * stages * count), np.empty(3 * stages * count, dtype=np.int64)
    place, free = np.zeros(devices, dtype=np.int64), np.zeros(devices)
    found = np.empty((lengths.sum(), 2), dtype=np.int64)
    value, span = _run(orders, lengths, count, stages, times, hops, INFINITY, finish, cause, place, free)
    number = _critical(orders, lengths, count, placement, finish, cause, found)
    best, best_span, best_orders = value, span, orders.copy()
    row = np.empty(orders.shape[1], dtype=np.int64)
    tried = 0
    while tried < moves and best_span > target:
        tried += 1
        d, start, goal = some_move(lengths, found, number)
        row[:] = orders[d]
        if _move(orders[d], start, goal, count, stages) == start:
            continue
        left = 1 - tried / moves
        enough = (value - warmth * best * left * left * np.log(1 - np.random.random())) * (1 + 1e-12)
        new = INFINITY
        if _fits(orders[d], lengths[d], count, stages, saved, kept, fused, limits[d]):
            new, span = _run(orders, lengths, count, stages, times, hops, enough, finish, cause, place, free)
        if new > enough:
            orders[d] = row
            continue
        value = new
        number = _critical(orders, lengths, count, placement, finish, cause, found)
        if value < best:
            best, best_span = value, span
            best_orders[:] = orders
    orders[:] = best_orders
    return best_span, tried


@njit()
def ends_of(
    count: int, placement: Any, times: Any, hops: Any, saved: Any, kept: Any, limits: Any, fused: Any, orders: Any,
    lengths: Any, finish: Any,
) -> float:  # fmt: skip
    """The makespan of orders, and the end of every action into ``finish``; arguments as in ``improve``.

    Infinite where something waits for itself, or a device holds more than it may.
    """
    stages, devices = placement.shape[0], orders.shape[0]
    for d in range(devices):
        if not _fits(orders[d], lengths[d], count, stages, saved, kept, fused, limits[d]):
            return INFINITY
    cause, place, free = np.empty(finish.shape[0], dtype=np.int64), np.zeros(devices, dtype=np.int64), np.zeros(devices)
    return _run(orders, lengths, count, stages, times, hops, INFINITY, finish, cause, place, free)[1]
