"""Orders from a beam search, for any placement of single operators; the fastest order if nothing was dropped.

Actions of all devices are appended in the order of their starts. Of two ways to one state, a way after which no action
has to start later makes the other one needless (dynamic programming with dominance). A way whose lower bound is not
below the best step is needless, too. Few ways are left where memory is short, or where the bound is close to the best
step: then the search is exhaustive. Of more than ``width`` ways after some number of actions the others are dropped.
"""

from typing import Any, NamedTuple

import numpy as np

from ...evaluate.coding import INFINITY, KINDS, Floats, Integers
from ...evaluate.compiled import StageArrays
from ...numba_cache import njit
from .action_series import Arcs, Series, arcs_of, raise_heads, series_of, tails_of_series
from .order_states import bound_of, find_possible, first_to_end

BALANCE, EARLY = 0.1, 1.0
"""Weights of the devices' earliest ends, and of the mean earliest start of all actions, among ways with similar
bounds. Of some values these let narrow beams find the most."""
EXACT = 1e-9
"""Share of a step within which times count as equal."""
MARK = 1_000_003
"""An odd number, whose powers are added up for the marks of states."""


class Ways(NamedTuple):
    """Ways to states; one entry per way.

    Args:
        begun, heads: see :func:`~.action_series.raise_heads`.
        ends: of the actions that have begun.
        bounds: lower bounds of the step.
        marks: a number that differs for different states, with few exceptions.
        keys: what decides which ways are dropped: the smallest are kept.
        parents, actions: the way before, and the series of the last action.
        alive: whether no other way makes it needless.
        following: another way to the same state, or −1.
    """

    begun: Integers
    heads: Floats
    ends: Floats
    bounds: Floats
    marks: Integers
    keys: Floats
    parents: Integers
    actions: Integers
    alive: "np.ndarray"
    following: Integers


class Found(NamedTuple):
    """The result of a beam search.

    Args:
        end_s: of the order; infinite without one.
        states: number of ways that were continued.
        depth: number of actions after which no way was left; all of them if there is an order.
        complete: whether nothing was dropped: then no order is faster, or as fast as the limit.
    """

    end_s: float
    states: int
    depth: int
    complete: bool


class BeamSearch:
    """The search on one placement of single operators.

    Args:
        count: microbatches.
        placement: device of every stage.
        costs: of the stages.
        limits: bytes that each device may hold.
    """

    def __init__(self, count: int, placement: Integers, costs: StageArrays, limits: Floats) -> None:
        self._count, self._placement = count, placement
        self._series = series_of(count, placement, costs, limits)
        self._arcs = arcs_of(count, placement, costs, self._series.room)

    def fill_fastest(self, width: int, most: int, stop_s: float, orders: Integers, lengths: Integers) -> Found:
        """Fill ``orders`` with the fastest order that ends before ``stop_s``, if one is found.

        Args:
            width: number of ways that are kept after each number of actions.
            most: the search ends before it continues more ways than this.
            stop_s: end of orders that are too slow.
            orders, lengths: coded orders.
        """
        stages, count = len(self._placement), self._count
        actions = np.empty(3 * stages * count, dtype=np.int64)
        found = Found(*_search(width, most, count, stop_s, self._series, self._arcs, actions))
        if found.end_s < INFINITY:
            begun = [0] * 3 * stages
            lengths[:] = 0
            for series in actions.tolist():
                kind, stage = divmod(series, stages)
                device = self._placement[stage]
                orders[device, lengths[device]] = KINDS * (stage * count + begun[series]) + kind
                begun[series] += 1
                lengths[device] += 1
        return found


@njit()
def _search(
    width: int, most: int, count: int, stop: float, series: Series, arcs: Arcs, actions: Any
) -> tuple[float, int, int, bool]:
    """Fill ``actions`` with the series of the actions of the fastest order; the values of :class:`Found`."""
    number = series.times.shape[0]
    length, capacity = number * count, width * number + 1
    now, new = _make_ways(width, number, count), _make_ways(capacity, number, count)
    tails, slots = tails_of_series(count, series, arcs), 1
    while slots < 2 * capacity:
        slots *= 2
    table, stamps = np.empty(slots, dtype=np.int64), np.full(slots, -1, dtype=np.int64)
    parents, last = np.empty((length, width), dtype=np.int64), np.empty((length, width), dtype=np.int64)
    now.begun[0], now.heads[0], now.ends[0], now.marks[0] = 0, 0.0, 0.0, 0
    raise_heads(count, now.begun[0], now.heads[0], arcs.order, arcs.first, arcs.source, arcs.apart, arcs.delay)
    kept, states, complete = 1, 0, True
    for depth in range(length):
        if states + kept > most:
            return INFINITY, states, depth, False
        states += kept
        size = _continue_all(count, stop, kept, depth, series, arcs, tails, now, new, table, stamps)
        best = np.flatnonzero(new.alive[:size])
        if best.shape[0] > width:
            complete = False
            best = best[np.argsort(new.keys[best], kind="mergesort")[:width]]
        kept = best.shape[0]
        if kept == 0:
            return INFINITY, states, depth, complete
        for x in range(kept):
            y = best[x]
            now.begun[x], now.heads[x], now.ends[x], now.marks[x] = (
                new.begun[y],
                new.heads[y],
                new.ends[y],
                new.marks[y],
            )
            parents[depth, x], last[depth, x] = new.parents[y], new.actions[y]
    x = int(np.argmin(now.ends[:kept]))
    end = now.ends[x]
    for depth in range(length - 1, -1, -1):
        actions[depth] = last[depth, x]
        x = parents[depth, x]
    return float(end), states, length, complete


@njit()
def _make_ways(size: int, series: int, count: int) -> Ways:
    """Ways to be filled."""
    return Ways(
        np.empty((size, series), dtype=np.int64), np.empty((size, series, count)), np.empty(size), np.empty(size),
        np.empty(size, dtype=np.int64), np.empty(size), np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64),
        np.empty(size, dtype=np.bool_), np.empty(size, dtype=np.int64),
    )  # fmt: skip


@njit()
def _continue_all(
    count: int, stop: float, kept: int, depth: int, series: Series, arcs: Arcs, tails: Any, now: Ways, new: Ways,
    table: Any, stamps: Any,
) -> int:  # fmt: skip
    """Fill ``new`` with the ways after one more action, some of which are not alive; return their number.

    Args:
        count: microbatches.
        stop: end of orders that are too slow.
        kept: number of ways ``now``.
        depth: number of actions that have begun.
        series, arcs, tails: of the placement.
        now, new: ways before and after.
        table, stamps: the last way of each state by its mark, where the stamp is ``depth``.
    """
    # In variables: reading these fields in the loops takes several times as long.
    times, again, after, device = series.times, series.again, series.after, series.device
    needs, harmless, holds, room = series.needs, series.harmless, series.holds, series.room
    order, first, source, apart, delay = arcs.order, arcs.first, arcs.source, arcs.apart, arcs.delay
    begun, heads, ends, marks = now.begun, now.heads, now.ends, now.marks
    next_begun, next_heads = new.begun, new.heads
    possible, size = np.empty(times.shape[0], dtype=np.bool_), 0
    rounding = EXACT * min(stop, tails.max())
    for x in range(kept):
        find_possible(count, begun[x], device, needs, holds, room, first, source, apart, possible)
        soonest, its_start = first_to_end(begun[x], heads[x], times, harmless, possible)
        for a in range(times.shape[0]):
            if not possible[a]:
                continue
            m, start = begun[x, a], heads[x, a, begun[x, a]]
            if start + tails[a, m] >= stop or (start >= soonest and start > its_start):
                continue
            _continue_with(a, count, begun[x], heads[x], times, again, device, next_begun[size], next_heads[size])
            raise_heads(count, next_begun[size], next_heads[size], order, first, source, apart, delay)
            end = max(ends[x], start + times[a] + after[a])
            bound = bound_of(
                count, next_begun[size], next_heads[size], tails, times, again, device, after, room.shape[0]
            )
            if max(end, bound) >= stop:
                continue
            mark = marks[x] + _power(MARK, a)
            slot = _slot_of(mark, depth, next_begun[size], new, table, stamps)
            latest = table[slot] if stamps[slot] == depth else -1
            if _is_needless(latest, size, end, max(end, bound), count, rounding, new):
                continue
            new.ends[size], new.bounds[size], new.marks[size] = end, max(end, bound), mark
            new.parents[size], new.actions[size], new.following[size], new.alive[size] = x, a, latest, True
            new.keys[size] = max(end, bound) + _lateness(
                count, next_begun[size], next_heads[size], times, device, room.shape[0]
            )
            table[slot], stamps[slot] = size, depth
            size += 1
    return size


@njit(inline="always")
def _power(base: int, exponent: int) -> int:
    """A power modulo 2⁶⁴."""
    result = 1
    for _ in range(exponent):
        result *= base
    return result


@njit()
def _continue_with(
    a: int, count: int, begun: Any, heads: Any, times: Any, again: Any, device: Any, next_begun: Any, next_heads: Any
) -> None:
    """Fill the state after the next action of series ``a``: others start no earlier, on its device after its end."""
    start = heads[a, begun[a]]
    next_begun[:] = begun
    next_begun[a] += 1
    for b in range(begun.shape[0]):
        low = start + times[a] + again[b] if device[b] == device[a] else start
        for m in range(next_begun[b]):
            next_heads[b, m] = heads[b, m]
        for m in range(next_begun[b], count):
            next_heads[b, m] = max(heads[b, m], low)


@njit()
def _slot_of(mark: int, depth: int, begun: Any, new: Ways, table: Any, stamps: Any) -> int:
    """Where the last way of a state is in the table, or an empty slot."""
    last = table.shape[0] - 1
    slot = (mark ^ (mark >> 23)) & last
    while stamps[slot] == depth:
        way = table[slot]
        if new.marks[way] == mark and np.array_equal(new.begun[way], begun):
            break
        slot = (slot + 1) & last
    return int(slot)


@njit()
def _is_needless(latest: int, size: int, end: float, bound: float, count: int, rounding: float, new: Ways) -> bool:
    """Whether another way to the state of the new way ``size`` makes it needless; the ways that it makes needless are
    marked.

    Args:
        latest: the last way to the state, or −1.
        size: number of the new way.
        end, bound: of the new way.
        count: microbatches.
        rounding: seconds within which times count as equal.
        new: the ways.
    """
    begun, heads, alive, ends, bounds = new.begun[size], new.heads, new.alive, new.ends, new.bounds
    following, way = new.following, latest
    while way >= 0:
        if alive[way]:
            if ends[way] <= bound and _is_no_later(count, begun, heads[way], heads[size], rounding):
                return True
            if end <= bounds[way] and _is_no_later(count, begun, heads[size], heads[way], rounding):
                alive[way] = False
        way = following[way]
    return False


@njit()
def _is_no_later(count: int, begun: Any, one: Any, other: Any, rounding: float) -> bool:
    """Whether after one way to a state no action starts later than after the other one."""
    for a in range(begun.shape[0]):
        for m in range(begun[a], count):
            if one[a, m] > other[a, m] + rounding:
                return False
    return True


@njit()
def _lateness(count: int, begun: Any, heads: Any, times: Any, device: Any, devices: int) -> float:
    """Weighted earliest ends of the devices that have actions left, and earliest starts of all actions."""
    ends, starts = 0.0, 0.0
    for d in range(devices):
        head, work = INFINITY, 0.0
        for a in range(begun.shape[0]):
            if device[a] == d and begun[a] < count:
                head = min(head, heads[a, begun[a]])
                work += (count - begun[a]) * times[a]
        if work > 0:
            ends += head + work
    for a in range(begun.shape[0]):
        for m in range(count):
            starts += heads[a, m]
    return float(BALANCE * ends + EARLY * starts / (begun.shape[0] * count))
