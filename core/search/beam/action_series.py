"""The actions of a placement of single operators as series, and which of them wait for which others.

The actions of one kind (F, I or W) on one stage are a series. They run in the order of the microbatches: these are
alike, so this excludes nothing. An arc says that action m of a series starts at least some time after action m − k of
another one.
"""

from typing import Any, NamedTuple

import numpy as np

from ...evaluate.coding import BOTH, FORWARD, INPUT, WEIGHT, Floats, Integers
from ...evaluate.compiled import END, START, StageArrays
from ...numba_cache import njit
from .placement_bound import ROUNDING, is_chain


class Series(NamedTuple):
    """What the actions of a series need; ``kind · stages + stage`` is the number of a series.

    Args:
        times: seconds of an action.
        again: seconds of the second forward before it.
        after: seconds that follow the last W of the series' device.
        device: of the series.
        needs: bytes that a running action adds.
        harmless: whether an earlier action leaves all others at least as much memory.
        holds: bytes of a microbatch between F and I, and between I and W, (2, stages).
        room: bytes that each device may hold, without its state.
    """

    times: Floats
    again: Floats
    after: Floats
    device: Integers
    needs: Floats
    harmless: "np.ndarray"
    holds: Floats
    room: Floats


class Arcs(NamedTuple):
    """Arcs between series.

    Args:
        order: of the series, in which arcs with k = 0 lead forwards.
        first: offsets of each series' incoming arcs into the next three, (series + 1).
        source, apart, delay: where an arc starts, k, and seconds between the starts.
    """

    order: Integers
    first: Integers
    source: Integers
    apart: Integers
    delay: Floats


def series_of(count: int, placement: Integers, costs: StageArrays, limits: Floats) -> Series:
    """The series of a placement.

    Args:
        count: microbatches.
        placement: device of every stage.
        costs: of the stages.
        limits: bytes that each device may hold.
    """
    stages, devices = len(placement), len(limits)
    start, end = costs.saved[START, :BOTH], costs.saved[END, :BOTH]
    holds, needs = np.cumsum(start + end, axis=0)[:WEIGHT], start + np.maximum(costs.workspace, end)
    room = limits - np.bincount(placement, costs.state, devices)
    most = np.bincount(placement, count * holds.max(axis=0), devices)
    np.maximum.at(largest := np.zeros(devices), placement, needs.max(axis=0))
    harmless = np.stack(
        ((most + largest <= room)[placement], holds[INPUT] <= holds[FORWARD], np.ones(stages, dtype=np.bool_))
    )
    again = np.zeros((BOTH, stages))
    again[INPUT] = costs.second_forward
    after = np.bincount(placement, costs.optimizer, devices)[placement]
    return Series(
        costs.times[:BOTH].reshape(-1), again.reshape(-1), np.tile(after, BOTH), np.tile(placement, BOTH),
        needs.reshape(-1), harmless.reshape(-1), holds, room,
    )  # fmt: skip


def arcs_of(count: int, placement: Integers, costs: StageArrays, room: Floats) -> Arcs:
    """The arcs of data, of each series' own order, and of memory.

    Args:
        count, placement, costs: see :func:`series_of`.
        room: bytes that each device may hold, without its state.
    """
    stages, times = len(placement), costs.times
    into: list[list[tuple[int, int, float]]] = [[] for _ in range(3 * stages)]
    for s in range(stages):
        forward, back, weight = (kind * stages + s for kind in (FORWARD, INPUT, WEIGHT))
        again = costs.second_forward[s]
        into[back].append((forward, 0, times[FORWARD, s] + again))
        into[weight].append((back, 0, times[INPUT, s]))
        for own, seconds in ((forward, times[FORWARD, s]), (back, times[INPUT, s] + again), (weight, times[WEIGHT, s])):
            into[own].append((own, 1, seconds))
        for e in range(costs.forward_first[s], costs.forward_first[s + 1]):
            source = int(costs.forward_from[e])
            into[forward].append((source, 0, times[FORWARD, source] + costs.forward_delay[e]))
        for e in range(costs.back_first[s], costs.back_first[s + 1]):
            source = int(costs.back_from[e])
            into[back].append((INPUT * stages + source, 0, times[INPUT, source] + costs.back_delay[e]))
        for kind, most in zip((INPUT, WEIGHT), _in_flight(s, placement, costs, room), strict=True):
            if most < count:
                into[forward].append((kind * stages + s, int(most), times[kind, s]))
    order = [*range(stages), *range(2 * stages - 1, stages - 1, -1), *range(2 * stages, 3 * stages)]
    first = np.cumsum([0, *map(len, into)])
    sources, aparts, delays = zip(*(arc for arcs in into for arc in arcs), strict=True)
    return Arcs(np.array(order), first, np.array(sources), np.array(aparts), np.array(delays))


def _in_flight(s: int, placement: Integers, costs: StageArrays, room: Floats) -> tuple[float, float]:
    """The most microbatches from the start of F on a stage to the end of its I, and to the end of its W."""
    after_forward = costs.after_forward
    own = [t for t in range(s + 1) if placement[t] == placement[s]] if is_chain(costs) else [s]
    held, left = after_forward[own].sum(), (room[placement[s]] - costs.workspace[s]) * (1 + ROUNDING)
    least = min(after_forward[s], costs.after_input[s])
    inputs = left // held if held > 0 else np.inf
    weights = 1 + (left - after_forward[s]) // least if least > 0 else np.inf
    return max(inputs, 1.0), max(weights, 1.0)


@njit()
def tails_of_series(count: int, series: Any, arcs: Any) -> Any:
    """Seconds from the start of every action to the end of all that follows it, (series, count)."""
    times, after = series.times, series.after
    order, first, source, apart, delay = arcs.order, arcs.first, arcs.source, arcs.apart, arcs.delay
    tails = np.empty((times.shape[0], count))
    for a in range(times.shape[0]):
        tails[a] = times[a] + after[a]
    for m in range(count - 1, -1, -1):
        for a in order[::-1]:
            for e in range(first[a], first[a + 1]):
                if m >= apart[e]:
                    b, n = source[e], m - apart[e]
                    tails[b, n] = max(tails[b, n], delay[e] + tails[a, m])
    return tails


@njit()
def raise_heads(
    count: int, begun: Any, heads: Any, order: Any, first: Any, source: Any, apart: Any, delay: Any
) -> None:
    """Raise the earliest starts of actions that have not begun as the arcs into them require.

    Args:
        count: microbatches.
        begun: actions of each series that have begun, (series).
        heads: earliest starts, (series, count), and starts of the actions that have begun.
        order, first, source, apart, delay: :class:`Arcs`.
    """
    for m in range(count):
        for place in range(order.shape[0]):
            a = order[place]
            if m < begun[a]:
                continue
            head = heads[a, m]
            for e in range(first[a], first[a + 1]):
                if m >= apart[e]:
                    head = max(head, heads[source[e], m - apart[e]] + delay[e])
            heads[a, m] = head
