"""All orders of a placement, by dynamic programming: one within a horizon, or that there is none.

1. Actions are appended in the order of their starts, over all devices. Microbatches are alike, and each operator runs
   them in their order; so a state is how many F, I and W of each operator have begun, and the memory follows from it.
2. A partial order is described by the earliest start of every action that is left. If no action starts later than in
   another one with the same state, it dominates that one: whatever follows the other one can follow it, no later.
3. One in which an action cannot end within the horizon is dropped. What follows an action is bounded by the paths from
   it, and by the work of its device that follows it.
4. An action from which no other one loses (W, I, and F where memory is no limit) runs first if it would end before the
   action that is appended starts: an order with such a gap is no faster.

The code is independent of the search for plans, and all times are whole numbers.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from attrs import frozen
from panpipe.core.evaluate.coding import FORWARD, INPUT, WEIGHT
from panpipe.core.numba_cache import njit

from benchmarks.planning.placed import Placed

NEVER = 1 << 30


@frozen
class Within:
    """An order within the horizon, if one is found.

    Args:
        step_s: its end; None without one.
        complete: whether no partial order was dropped for lack of space: then without an order there is none.
        widest: most partial orders with the same number of actions.
    """

    step_s: int | None
    complete: bool
    widest: int


class OrderSearch:
    """The search on one placement.

    Args:
        placed: the placement.
    """

    def __init__(self, placed: Placed) -> None:
        count, device = placed.count, np.array(placed.device_of)
        saved, workspace, spare = (np.array(each) for each in (placed.saved, placed.workspace, placed.spare))
        short = [False] * len(placed.on)
        for d, own in enumerate(placed.on):
            largest = max((placed.workspace[i] for i in own), default=0)
            short[d] = count * sum(placed.saved[i] for i in own) + largest > placed.spare[d]
        self._arguments = (
            count, np.array(placed.times).T.copy(), _waits(placed), device, saved, workspace, spare, np.array(short)
        )  # fmt: skip

    def order_within(self, horizon: int, most: int) -> Within:
        """An order with a step of at most ``horizon``.

        Args:
            horizon: the longest step.
            most: partial orders that are kept after the same number of actions; those with the smallest bounds.
        """
        assert horizon < 1 << 15, "starts are kept in 16 bits"
        step, complete, widest = _search(horizon, most, *self._arguments)
        return Within(None if step < 0 else step, complete, widest)


def _waits(placed: Placed) -> "np.ndarray":
    """What waits for what: (kind, operator) of the earlier action, of the later one, by how many microbatches the
    earlier one is ahead, and the least time between the starts; in an order in which no row precedes what it needs."""
    times, count, rows = placed.times, placed.count, []
    for i in placed.operators:
        for kind in (FORWARD, INPUT, WEIGHT):
            rows.append((kind, i, kind, i, 1, times[i][kind]))
        rows.append((FORWARD, i, INPUT, i, 0, times[i][FORWARD]))
        rows.append((INPUT, i, WEIGHT, i, 0, times[i][INPUT]))
    for a, b, out, back in placed.edges:
        rows.append((FORWARD, a, FORWARD, b, 0, times[a][FORWARD] + out))
        rows.append((INPUT, b, INPUT, a, 0, times[b][INPUT] + back))
    for d, spare in enumerate(placed.spare):
        for i, most in placed.in_flight(d):
            rows.append((INPUT, i, FORWARD, i, most, times[i][INPUT]))
            if placed.saved[i]:
                until_weight = (spare - placed.workspace[i]) // placed.saved[i]
                rows.append((WEIGHT, i, FORWARD, i, until_weight, times[i][WEIGHT]))
    rows = [row for row in rows if row[4] < count]
    return np.array(sorted(rows, key=lambda row: (row[2], -row[3] if row[2] == INPUT else row[3])))


@njit()
def _tails(count: int, times: Any, waits: Any, device: Any) -> Any:
    """The least time from the start of every action to the end of the step, (kinds, operators, microbatches)."""
    tails = np.zeros((3, times.shape[1], count), dtype=np.int64)
    for i in range(times.shape[1]):
        after_forward, after_input = 0, 0  # work of the device in each microbatch that follows F and I
        for j in range(times.shape[1]):
            if device[j] == device[i]:
                backward = times[INPUT, j] + times[WEIGHT, j]
                after_forward += backward + (times[FORWARD, j] if j >= i else 0)
                after_input += backward if j <= i else 0
        for m in range(count):
            tails[FORWARD, i, m] = (count - m) * after_forward
            tails[INPUT, i, m] = (count - m) * after_input
            tails[WEIGHT, i, m] = times[WEIGHT, i]
    for m in range(count - 1, -1, -1):
        for row in range(waits.shape[0] - 1, -1, -1):
            kind, i, later, j, apart, delay = waits[row]
            if m >= apart:
                tails[kind, i, m - apart] = max(tails[kind, i, m - apart], delay + tails[later, j, m])
    return tails


@njit()
def _raise_starts(count: int, begun: Any, starts: Any, waits: Any) -> None:
    """Raise the earliest starts of actions that are left to what the actions before them require."""
    for m in range(count):
        for row in range(waits.shape[0]):
            kind, i, later, j, apart, delay = waits[row]
            if m >= apart and m >= begun[later, j]:
                starts[later, j, m] = max(starts[later, j, m], starts[kind, i, m - apart] + delay)


@njit()
def _bound(count: int, begun: Any, starts: Any, times: Any, tails: Any, device: Any) -> int:
    """A lower bound of the end of the actions that are left: paths, and on each device first start, work and least tail
    of all of them, of I and W, of F and I, and of I."""
    operators, bound = times.shape[1], 0
    for d in range(device.max() + 1):
        first, work, drain = np.full(3, NEVER), np.zeros(3, dtype=np.int64), NEVER
        for i in range(operators):
            for kind in range(3):
                m = begun[kind, i]
                if device[i] == d and m < count:
                    first[kind] = min(first[kind], starts[kind, i, m])
                    work[kind] += (count - m) * times[kind, i]
                    bound = max(bound, starts[kind, i, m] + tails[kind, i, m])
                    if kind == INPUT:
                        drain = min(drain, tails[INPUT, i, count - 1] - times[INPUT, i])
        backward = min(first[INPUT], first[WEIGHT])
        if min(first[FORWARD], backward) < NEVER:
            bound = max(bound, min(first[FORWARD], backward) + work.sum())
        if backward < NEVER:
            bound = max(bound, backward + work[INPUT] + work[WEIGHT])
        if first[INPUT] < NEVER:
            before = min(first[FORWARD], first[INPUT]) + work[FORWARD]
            bound = max(bound, max(before, first[INPUT]) + work[INPUT] + drain)
    return bound


@njit()
def _find_ready(
    count: int, begun: Any, waits: Any, device: Any, saved: Any, workspace: Any, spare: Any, ready: Any
) -> None:
    """Fill ``ready``: whether the next action of each kind and operator has its inputs and enough memory."""
    held = np.zeros(spare.shape[0], dtype=np.int64)
    for i in range(device.shape[0]):
        held[device[i]] += saved[i] * (begun[FORWARD, i] - begun[WEIGHT, i])
    for i in range(device.shape[0]):
        for kind in range(3):
            need = held[device[i]] + workspace[i] + (saved[i] if kind == FORWARD else 0)
            ready[kind, i] = begun[kind, i] < count and need <= spare[device[i]]
    for row in range(waits.shape[0]):
        kind, i, later, j, apart, _ = waits[row]
        if begun[kind, i] <= begun[later, j] - apart:
            ready[later, j] = False


@njit()
def _is_no_later(count: int, begun: Any, one: Any, other: Any) -> bool:
    """Whether no action that is left starts later in one partial order than in another one."""
    for kind in range(3):
        for i in range(begun.shape[1]):
            for m in range(begun[kind, i], count):
                if one[kind, i, m] > other[kind, i, m]:
                    return False
    return True


@njit()
def _is_dominated(first: int, count: int, state: Any, starts: Any, others: Any, states: Any, after: Any,
                  alive: Any) -> bool:  # fmt: skip
    """Whether one of the partial orders from ``first`` on dominates a new one; those that it dominates are dropped."""
    y = first
    while y >= 0:
        if alive[y] and np.array_equal(states[y], state):
            if _is_no_later(count, state, others[y], starts):
                return True
            alive[y] = not _is_no_later(count, state, starts, others[y])
        y = after[y]
    return False


@njit()
def _search(
    horizon: int, most: int, count: int, times: Any, waits: Any, device: Any, saved: Any, workspace: Any, spare: Any,
    short: Any,
) -> tuple[int, bool, int]:  # fmt: skip
    """The step of an order or −1, and the rest of :class:`Within`."""
    operators, complete, widest = times.shape[1], True, 1
    tails = _tails(count, times, waits, device)
    begun, marks = np.zeros((1, 3, operators), dtype=np.int8), np.zeros(1, dtype=np.int64)
    starts, first = np.zeros((1, 3, operators, count), np.int16), np.zeros((3, operators, count), dtype=np.int64)
    _raise_starts(count, begun[0], first, waits)
    if _bound(count, begun[0], first, times, tails, device) > horizon:
        return -1, True, 1
    starts[0] = first
    for _ in range(3 * operators * count):
        begun, starts, marks, bounds = _appended(
            count, horizon, begun, starts, marks, times, tails, waits, device, saved, workspace, spare, short
        )
        if begun.shape[0] > most:
            complete = False
            kept = np.argsort(bounds, kind="mergesort")[:most]
            begun, starts, marks = begun[kept], starts[kept], marks[kept]
        if begun.shape[0] == 0:
            return -1, complete, widest
        widest = max(widest, begun.shape[0])
    step = 0
    for kind in range(3):
        for i in range(operators):
            step = max(step, starts[0, kind, i, count - 1] + times[kind, i])
    return step, complete, widest


@njit()
def _doubled(rows: Any) -> Any:
    """An array with twice as many rows."""
    return np.concatenate((rows, np.empty_like(rows)))


@njit()
def _soonest(begun: Any, starts: Any, times: Any, device: Any, short: Any, ready: Any) -> tuple[int, int]:
    """End and start of the action that ends first of those from which no other one loses."""
    end, start = NEVER, NEVER
    for kind in range(3):
        for i in range(device.shape[0]):
            if ready[kind, i] and (kind > FORWARD or not short[device[i]]):
                own = np.int64(starts[kind, i, begun[kind, i]])
                if own + times[kind, i] < end:
                    end, start = own + times[kind, i], own
    return end, start


@njit()
def _append(kind: int, i: int, count: int, times: Any, waits: Any, device: Any, state: Any, starts: Any) -> int:
    """Append the next action of a kind and operator to a partial order, which is changed; return the action's end."""
    start = starts[kind, i, state[kind, i]]
    end = start + times[kind, i]
    state[kind, i] += 1
    for j in range(device.shape[0]):
        low = end if device[j] == device[i] else start
        for other in range(3):
            for m in range(state[other, j], count):
                starts[other, j, m] = max(starts[other, j, m], low)
    _raise_starts(count, state, starts, waits)
    return end


@njit()
def _appended(
    count: int, horizon: int, begun: Any, starts: Any, marks: Any, times: Any, tails: Any, waits: Any, device: Any,
    saved: Any, workspace: Any, spare: Any, short: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """The partial orders with one more action that none dominates: states, starts, hashes of the states, and bounds."""
    size, capacity, shape = 0, 4 * begun.shape[0] + 1024, begun.shape[1:]
    new_begun, new_starts = np.empty((capacity, *shape), np.int8), np.empty((capacity, *shape, count), np.int16)
    new_marks, bounds = np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.int64)
    after, alive = np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.bool_)
    latest = {np.int64(0): np.int64(-1)}
    ready, state, now = np.empty(shape, np.bool_), np.empty(shape, np.int64), np.empty((*shape, count), np.int64)
    for x in range(begun.shape[0]):
        _find_ready(count, begun[x], waits, device, saved, workspace, spare, ready)
        soonest, its_start = _soonest(begun[x], starts[x], times, device, short, ready)
        for series in range(ready.size):
            kind, i = divmod(series, shape[1])
            start = starts[x, kind, i, min(begun[x, kind, i], count - 1)]
            if not ready[kind, i] or (start >= soonest and start > its_start):
                continue
            state[:], now[:] = begun[x], starts[x]
            end = _append(kind, i, count, times, waits, device, state, now)
            bound = max(end, _bound(count, state, now, times, tails, device))
            if bound > horizon:
                continue
            mark = marks[x] + np.int64(1_000_003) ** series
            head = latest[mark] if mark in latest else np.int64(-1)
            if _is_dominated(head, count, state, now, new_starts, new_begun, after, alive):
                continue
            if size == alive.shape[0]:
                new_begun, new_starts, new_marks = _doubled(new_begun), _doubled(new_starts), _doubled(new_marks)
                bounds, after, alive = _doubled(bounds), _doubled(after), _doubled(alive)
            new_begun[size], new_starts[size], new_marks[size], bounds[size] = state, now, mark, bound
            after[size], alive[size], latest[mark] = head, True, np.int64(size)
            size += 1
    kept = np.flatnonzero(alive[:size])
    return new_begun[kept], new_starts[kept], new_marks[kept], bounds[kept]
