"""States of a search over orders: which actions are possible, and the least step that is left.

A state is the number of actions of each series that have begun; the held memory follows from it. Whatever else matters
are the earliest starts of the other actions.
"""

from typing import Any

from ...evaluate.coding import INFINITY
from ...numba_cache import njit


@njit()
def find_possible(count: int, begun: Any, device: Any, needs: Any, holds: Any, room: Any, first: Any, source: Any,
                  apart: Any, possible: Any) -> None:  # fmt: skip
    """Fill ``possible``: whether the next action of each series has its inputs and enough memory.

    Args:
        count: microbatches.
        begun: actions of each series that have begun.
        device, needs, holds, room: :class:`Series`.
        first, source, apart: :class:`Arcs`.
        possible: filled, (series).
    """
    stages = holds.shape[1]
    for a in range(begun.shape[0]):
        m, possible[a] = begun[a], begun[a] < count
        for e in range(first[a], first[a + 1]):
            if m >= apart[e] and begun[source[e]] <= m - apart[e]:
                possible[a] = False
        if possible[a]:
            need = needs[a]
            for s in range(stages):
                if device[s] == device[a]:
                    need += holds[0, s] * (begun[s] - begun[stages + s])
                    need += holds[1, s] * (begun[stages + s] - begun[2 * stages + s])
            possible[a] = need <= room[device[a]]


@njit()
def first_to_end(begun: Any, heads: Any, times: Any, harmless: Any, possible: Any) -> tuple[float, float]:
    """End and start of the possible harmless action that ends first.

    No action has to start later than that end: in the time before it the harmless one can run, which delays nothing.
    """
    end, start = INFINITY, INFINITY
    for a in range(begun.shape[0]):
        if possible[a] and harmless[a] and heads[a, begun[a]] + times[a] < end:
            start = heads[a, begun[a]]
            end = start + times[a]
    return end, start


@njit()
def bound_of(count: int, begun: Any, heads: Any, tails: Any, times: Any, again: Any, device: Any, after: Any,
             devices: int) -> float:  # fmt: skip
    """A lower bound of the end of all other actions.

    The largest of the heads and tails of single actions, and on each device of the head, the work and the tail of all
    other actions, of all backwards, of all F and I, and of all I.

    Args:
        count, begun, heads: see :func:`~.action_series.raise_heads`.
        tails: see :func:`~.action_series.tails_of_series`.
        times, again, device, after: :class:`Series`.
        devices: how many there are.
    """
    bound, stages = 0.0, times.shape[0] // 3
    for a in range(times.shape[0]):
        if begun[a] < count:
            bound = max(bound, heads[a, begun[a]] + tails[a, begun[a]])
    for d in range(devices):
        forward, back, weight, drain, end = INFINITY, INFINITY, INFINITY, INFINITY, 0.0
        forwards, backs, weights = 0.0, 0.0, 0.0
        for a in range(times.shape[0]):
            m = begun[a]
            if device[a] != d or m == count:
                continue
            end, work = after[a], (count - m) * (times[a] + again[a])
            if a < stages:
                forward, forwards = min(forward, heads[a, m]), forwards + work
            elif a < 2 * stages:
                back, backs = min(back, heads[a, m] - again[a]), backs + work
                drain = min(drain, tails[a, count - 1] - times[a])
            else:
                weight, weights = min(weight, heads[a, m]), weights + work
        backward = min(back, weight)
        if min(forward, backward) < INFINITY:
            bound = max(bound, min(forward, backward) + forwards + backs + weights + end)
        if backward < INFINITY:
            bound = max(bound, backward + backs + weights + end)
        if back < INFINITY:
            bound = max(bound, min(forward, back) + forwards + backs + drain, back + backs + drain)
    return bound
