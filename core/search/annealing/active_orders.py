"""Orders from keys for any placement of single operators: a search over keys, before single actions are moved.

An active order (Giffler and Thompson, Algorithms for solving production scheduling problems, 1960): of the actions that
can start on a device before another one of them could end there, the one with the largest key runs next. Keys that
follow the longest path give good orders at once, where moves of single actions need thousands of evaluations.

A forward starts only if its device can then still finish all its microbatches, oldest first, as in
`schedules/construction/decode`. So an order is found wherever one microbatch fits.
"""

from typing import Any

import numpy as np

from ...evaluate.coding import FORWARD, INFINITY, INPUT, KINDS, WEIGHT
from ...evaluate.compiled import END, START
from ...numba_cache import njit
from ...schedules.construction.shifts import metropolis
from .placement_bound import tails_of

BUILDING = 15
"""Cost of one order, in evaluations of an order."""
DRAWN = 32
"""Most orders from new keys; the others are from keys that changed."""
PACE = (0.3, 1.5)
"""Interval of the later due time of a microbatch than of the one before, per time of a microbatch on the busiest
device."""
TEMPERATURE = 0.002
"""Initial temperature of annealing the keys, as a share of the step; it falls to 0."""


@njit()
def search_keys(seed: int, tries: int, count: int, placement: Any, costs: Any, limits: Any, orders: Any,
                lengths: Any) -> float:  # fmt: skip
    """Fill ``orders`` with the fastest of some active orders.

    Args:
        seed: of the random numbers.
        tries: number of orders.
        count: microbatches.
        placement: device of every stage.
        costs: :class:`StageArrays`.
        limits: bytes that each device may hold.
        orders, lengths: coded orders, filled if the result is finite.

    Returns:
        The end of the last action; infinite if one microbatch does not fit.
    """
    np.random.seed(seed)
    stages = placement.shape[0]
    tails, work = tails_of(costs, np.zeros(stages)), np.zeros(lengths.shape[0])
    for s in range(stages):
        work[placement[s]] += costs.times[FORWARD, s] + costs.times[INPUT, s] + costs.times[WEIGHT, s]
    pace = work.max()
    new_orders, new_lengths = orders.copy(), lengths.copy()
    keys, kept = np.zeros((3, stages, count)), np.zeros((3, stages, count))
    waiting, kept_waiting, best, value = 0.0, 0.0, INFINITY, INFINITY
    drawn = min(DRAWN, tries)
    for i in range(tries):
        threshold = value
        if i < drawn:
            waiting = np.random.random() if np.random.random() < 0.5 else 0.0
            _draw_keys(tails, pace, keys)
        else:
            keys[:] = kept
            left = 1 - (i - drawn) / (tries - drawn)
            threshold = metropolis(value, TEMPERATURE * best * left * left)
            waiting = _change_keys(pace, kept_waiting, keys)
        end = _build(count, placement, costs, limits, keys, waiting, new_orders, new_lengths)
        if end == INFINITY:
            return best
        if end <= threshold:
            value, kept_waiting = end, waiting
            kept[:] = keys
        if end < best:
            best = end
            orders[:], lengths[:] = new_orders, new_lengths
    return best


@njit()
def _draw_keys(tails: Any, pace: float, keys: Any) -> None:
    """Keys from the time that follows an action: its microbatch's number and its stage decide how urgent it is."""
    noise = pace * np.random.random()
    later = PACE[0] + (PACE[1] - PACE[0]) * np.random.random()
    weight_later = PACE[0] + (PACE[1] - PACE[0]) * np.random.random()
    for kind in range(3):
        each = pace * (weight_later if kind == WEIGHT else later)
        for s in range(keys.shape[1]):
            first = tails[kind, s] + noise * np.random.standard_normal()
            for m in range(keys.shape[2]):
                keys[kind, s, m] = first - m * each


@njit()
def _change_keys(pace: float, waiting: float, keys: Any) -> float:
    """Change the keys of a kind on one stage or some, for one, some or all microbatches; return the new ``waiting``."""
    stages, count = keys.shape[1], keys.shape[2]
    while True:
        size = np.random.standard_normal() * pace * (0.6 if np.random.random() < 0.5 else 0.2)
        kind, s, draw = np.random.randint(3), np.random.randint(stages), np.random.random()
        first = np.random.randint(count)
        last = first + 1 + np.random.randint(count - first)
        if draw < 0.3:
            first, last = 0, count
        elif draw < 0.65:
            last = first + 1
        through = min(s + 1 + np.random.randint(3), stages) if np.random.random() < 0.2 else s + 1
        keys[kind, s:through, first:last] += size
        if np.random.random() < 0.1:
            waiting = max(0.0, min(1.0, waiting + 0.3 * np.random.standard_normal()))
        if np.random.random() > 0.3:
            return waiting


@njit(inline="always")
def _second_bytes(costs: Any, s: int) -> float:
    """Bytes that a running backward needs in addition to the saved tensors."""
    return float(costs.workspace[s] + costs.saved[START, INPUT, s])


@njit()
def _may_begin(
    s: int, m: int, placement: Any, costs: Any, held: Any, following: Any, total: float, room: float
) -> bool:
    """Whether after F of microbatch ``m`` on stage ``s`` the device can finish its microbatches, oldest first.

    Args:
        s, m, placement, costs: as above.
        held: most bytes that a microbatch holds on each stage between two actions, (stages).
        following: next microbatch of each kind and stage, (3, stages).
        total: bytes that the device holds, without its state.
        room: bytes that it may hold, without its state.
    """
    d, stages = placement[s], placement.shape[0]
    total += held[s]
    if total + _second_bytes(costs, s) > room:
        return False
    oldest, newest = m, m
    for t in range(stages):
        if placement[t] == d:
            oldest, newest = min(oldest, following[WEIGHT, t]), max(newest, following[FORWARD, t] - 1)
    for n in range(oldest, newest + 1):
        own = 0.0
        for t in range(stages):
            begun = n < following[FORWARD, t] or (t == s and n == m)
            if placement[t] == d and begun and following[WEIGHT, t] <= n:
                own += held[t]
        if own == 0.0:
            continue
        others, through = total - own, 0.0
        for t in range(stages):
            if placement[t] == d and following[WEIGHT, t] <= n:
                through += held[t]
                if others + through + _second_bytes(costs, t) > room:
                    return False
        total = others
    return True


@njit(inline="always")
def _inputs_end(kind: int, s: int, m: int, costs: Any, following: Any, finish: Any) -> float:
    """When the inputs of an action are on its device; infinite if one is not computed yet."""
    at = 0.0
    if kind == FORWARD:
        for e in range(costs.forward_first[s], costs.forward_first[s + 1]):
            source = costs.forward_from[e]
            if following[FORWARD, source] <= m:
                return INFINITY
            at = max(at, finish[FORWARD, source, m] + costs.forward_delay[e])
        return at
    if following[kind - 1, s] <= m:
        return INFINITY
    if kind == INPUT:
        for e in range(costs.back_first[s], costs.back_first[s + 1]):
            source = costs.back_from[e]
            if following[INPUT, source] <= m:
                return INFINITY
            at = max(at, finish[INPUT, source, m] + costs.back_delay[e])
    return float(max(at, finish[kind - 1, s, m]))


@njit()
def _build(
    count: int, placement: Any, costs: Any, limits: Any, keys: Any, waiting: float, orders: Any, lengths: Any
) -> float:
    """Fill ``orders`` with the active order of some keys; return its end, infinite if memory ends it before.

    Args:
        count, placement, costs, limits, orders, lengths: see :func:`search_keys`.
        keys: of every action, (3, stages, count); the largest goes first.
        waiting: how long a device may wait for an action with a larger key: 0 for none, 1 up to the earliest end of
            any action.
    """
    stages, devices = placement.shape[0], lengths.shape[0]
    times, room, free, total = costs.times, limits.copy(), np.zeros(devices), np.zeros(devices)
    finish, following = np.zeros((3, stages, count)), np.zeros((3, stages), dtype=np.int64)
    inputs, starts = np.full((3, stages), INFINITY), np.empty((3, stages))
    held, all_held = np.empty(stages), np.zeros(devices)
    for s in range(stages):
        held[s] = max(costs.saved[START, FORWARD, s], -costs.saved[END, WEIGHT, s])
        room[placement[s]] -= costs.state[s]
        all_held[placement[s]] += count * held[s] + _second_bytes(costs, s)
    short = all_held > room
    lengths[:] = 0
    for _ in range(3 * stages * count):
        # 1. When the next action of each kind and stage can start.
        for kind in range(3):
            for s in range(stages):
                m, d = following[kind, s], placement[s]
                starts[kind, s] = INFINITY
                if m == count:
                    continue
                if inputs[kind, s] == INFINITY:
                    inputs[kind, s] = _inputs_end(kind, s, m, costs, following, finish)
                if inputs[kind, s] < INFINITY and (
                    not short[d] or _fits(kind, s, m, placement, costs, held, following, total[d], room[d])
                ):
                    now = free[d] + costs.second_forward[s] if kind == INPUT else free[d]
                    starts[kind, s] = max(inputs[kind, s], now)
        # 2. The action with the largest key on the device on which one can end first.
        kind, s = _chosen(placement, times, starts, keys, following, waiting)
        if s < 0:
            return INFINITY
        d, m = placement[s], following[kind, s]
        free[d] = finish[kind, s, m] = starts[kind, s] + times[kind, s]
        following[kind, s] += 1
        inputs[kind, s] = INFINITY
        if kind == FORWARD:
            total[d] += held[s]
        elif kind == WEIGHT:
            total[d] -= held[s]
        orders[d, lengths[d]] = KINDS * (s * count + m) + kind
        lengths[d] += 1
    return float(free.max())


@njit()
def _chosen(placement: Any, times: Any, starts: Any, keys: Any, following: Any, waiting: float) -> tuple[int, int]:
    """Kind and stage of the action that runs next; −1 as the stage if none can start."""
    stages, device, soonest = placement.shape[0], -1, INFINITY
    for kind in range(3):
        for s in range(stages):
            if starts[kind, s] + times[kind, s] < soonest:
                device, soonest = placement[s], starts[kind, s] + times[kind, s]
    earliest = INFINITY
    for kind in range(3):
        for s in range(stages):
            if placement[s] == device:
                earliest = min(earliest, starts[kind, s])
    key, kind_of, stage = -INFINITY, 0, -1
    for kind in range(3):
        for s in range(stages):
            if placement[s] == device and starts[kind, s] <= earliest + waiting * (soonest - earliest):
                own = keys[kind, s, following[kind, s]]
                if own > key:
                    key, kind_of, stage = own, kind, s
    return kind_of, stage


@njit(inline="always")
def _fits(
    kind: int, s: int, m: int, placement: Any, costs: Any, held: Any, following: Any, total: float, room: float
) -> bool:
    """Whether a device may run an action now."""
    if kind == FORWARD:
        return bool(_may_begin(s, m, placement, costs, held, following, total, room))
    return bool(total + _second_bytes(costs, s) <= room)
