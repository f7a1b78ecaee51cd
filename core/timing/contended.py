"""Time of coded orders where messages share links: the rules of the simulator for compute and messages, compiled.

Messages from one device to another form an in-order queue. A message starts when it is sent, its receive is posted and
the previous message has drained; it drains at its max-min fair share of the links that it crosses, and arrives one path
latency later. Gradient reductions and gathers are timed as in `compiled`: without contention.

Of several replicas the first is run; a message crosses the links of all replicas' messages, which run at equal times.

The messages of coded orders are in the order of their sends. A receive is posted as lowering places it: ``PREFETCH``
compute actions before its reader, and earlier where the order of its queue requires it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..cluster.cluster import Cluster
from ..numba_cache import njit
from .coding import BOTH, FORWARD, INFINITY, INPUT, KINDS, WEIGHT, Floats, Integers
from .compiled import UNKNOWN, end_of_step, sum_gradients


@njit()
def _fill_where(orders: Any, lengths: Any, where: Any) -> None:
    """Fill ``where``; a B also fills its I's entry."""
    for d in range(orders.shape[0]):
        for i in range(lengths[d]):
            code = orders[d, i]
            where[code] = i
            if code & 3 == BOTH:
                where[code - 2] = i


@njit()
def _local_inputs(
    d: int, kind: int, place: int, stage: int, count: int, placement: Any, costs: Any, finish: Any
) -> bool:
    """Whether the inputs that device ``d`` computes itself are there."""
    if kind == WEIGHT:
        return bool(finish[KINDS * place + INPUT] >= 0)
    if kind == FORWARD:
        for source in costs.forward_from[costs.forward_first[stage] : costs.forward_first[stage + 1]]:
            if placement[source] == d and finish[KINDS * (place + (source - stage) * count)] < 0:
                return False
        return True
    for source in costs.back_from[costs.back_first[stage] : costs.back_first[stage + 1]]:
        if placement[source] == d and finish[KINDS * (place + (source - stage) * count) + INPUT] < 0:
            return False
    return bool(finish[KINDS * place] >= 0)


@njit()
def run_contended(  # noqa: PLR0915 - its parts are inner functions, which share its arrays
    orders: Any,
    lengths: Any,
    count: int,
    placement: Any,
    costs: Any,
    latency: Any,
    rate: Any,
    links: Any,
    work: Any,
    stop: float,
    scratch: Any,
) -> float:
    """The step, with messages that share links; further arguments and result as of ``compiled.run``.

    Args:
        latency, rate: of the path of every pair of devices, (devices, devices).
        links: :class:`LinkArrays`.
    """
    devices, pairs = orders.shape[0], orders.shape[0] * orders.shape[0]
    finish, free, position, left_s = scratch.finish, scratch.free, scratch.place, scratch.left
    summed, queue, stage_of, cause = scratch.summed, scratch.queue, scratch.stage_of, scratch.cause
    finish[:], free[:], position[:], left_s[:] = -1.0, 0.0, 0, work
    summed[:], queue[:] = 0.0, 0.0
    _fill_where(orders, lengths, scratch.where)
    messages = all_messages(orders, lengths, count, placement, costs, scratch.where)
    begins, issued, posted, sizes = messages.begins, messages.issued, messages.posted, messages.size
    sources, readers = messages.source, messages.reader
    pending, arrived, whys = messages.pending, messages.arrived, messages.why
    first_link, link_of, capacity = links.first, links.link, links.capacity
    times, second_forward, scatter = costs.times, costs.second_forward, costs.scatter
    # The messages in transit, one of each pair at most: their pairs are the first entries of `active`, and the other
    # arrays are by pair: the next message to start, or the one in transit; whether one is in transit; its bytes left at
    # time `since`, from which on `flow_rate` applies; and when it has drained at this rate.
    active, following = np.full(pairs, -1, dtype=np.int64), begins[:pairs].copy()
    flowing, left = np.zeros(pairs, dtype=np.bool_), np.zeros(pairs)
    flow_rate, since, drained = np.zeros(pairs), np.zeros(pairs), np.full(pairs, INFINITY)
    fair, growing = np.zeros(pairs), np.empty(pairs, dtype=np.int64)
    share, spare, crossing = capacity.copy(), capacity.copy(), np.zeros(capacity.shape[0], dtype=np.int64)
    moved, stale = np.ones(devices, dtype=np.bool_), np.ones(devices, dtype=np.bool_)
    ending = np.full(devices, INFINITY)

    def fill_fair_rates(number: int) -> None:
        """Fill ``fair`` with the max-min fair rates of the active pairs, by progressive filling, as in
        ``simulators/network``."""
        growing[:number], spare[:] = active[:number], capacity
        while number > 0:
            crossing[:] = 0
            level = INFINITY
            for pair in growing[:number]:
                level = min(level, rate[pair // devices, pair % devices])
                for link in link_of[first_link[pair] : first_link[pair + 1]]:
                    crossing[link] += 1
            for link in range(spare.shape[0]):
                share[link] = spare[link] / crossing[link] if crossing[link] > 0 else INFINITY
                level = min(level, share[link])
            kept = 0
            for pair in growing[:number]:
                full = rate[pair // devices, pair % devices] <= level
                for link in link_of[first_link[pair] : first_link[pair + 1]]:
                    full = full or share[link] <= level
                if full:
                    fair[pair] = level
                    for link in link_of[first_link[pair] : first_link[pair + 1]]:
                        spare[link] -= level
                else:
                    growing[kept] = pair
                    kept += 1
            number = kept

    def set_rates(now: float, number: int) -> None:
        """Give every message in transit its fair rate from now on."""
        fill_fair_rates(number)
        for pair in active[:number]:
            if fair[pair] != flow_rate[pair]:
                if now > since[pair]:
                    left[pair] = max(left[pair] - flow_rate[pair] * (now - since[pair]), 0.0)
                flow_rate[pair], since[pair] = fair[pair], now
                drained[pair] = now + left[pair] / fair[pair]

    def start_messages(now: float, number: int) -> int:
        """Start the messages that are sent and whose receives are posted; the number of messages then in transit."""
        for pair in range(pairs):
            a, b, m = pair // devices, pair % devices, following[pair]
            if flowing[pair] or m == begins[pair + 1] or not (moved[a] or moved[b]):
                continue
            if issued[m] < position[a] and posted[m] <= position[b]:
                flowing[pair], active[number] = True, pair
                left[pair], flow_rate[pair], since[pair] = sizes[m], 0.0, now
                number += 1
        return number

    def end_messages(now: float, number: int) -> int:
        """End the messages that have drained; the number of messages still in transit."""
        kept = 0
        for pair in active[:number]:
            if drained[pair] > now:
                active[kept] = pair
                kept += 1
                continue
            m, a, b = following[pair], pair // devices, pair % devices
            reader, at = readers[m], now + latency[a, b]
            following[pair] += 1
            flowing[pair], drained[pair] = False, INFINITY
            pending[reader] -= 1
            if at >= arrived[reader]:
                arrived[reader], whys[reader] = at, sources[m]
            moved[a] = stale[b] = True
        return kept

    def started(d: int, code: int) -> float:
        """The end of an action that device ``d`` starts as soon as it may; infinite while an input is missing."""
        kind, place = code & 3, code >> 2
        stage, at, why = stage_of[place], free[d], UNKNOWN
        if not _local_inputs(d, kind, place, stage, count, placement, costs, finish):
            return INFINITY
        if kind != WEIGHT:
            reader = 2 * place + (0 if kind == FORWARD else 1)
            if pending[reader] > 0:
                return INFINITY
            if kind != FORWARD:
                at += second_forward[stage]
            if arrived[reader] > at:
                at, why = arrived[reader], whys[reader]
        if kind in (WEIGHT, BOTH) and summed[stage] > at:
            at, why = summed[stage], UNKNOWN
        cause[code] = why
        if kind == BOTH:
            cause[code - 2] = why
        ends: float = at + times[kind, stage]
        return ends

    number, todo, now, changed = 0, lengths.sum(), 0.0, False
    while True:
        more = start_messages(now, number)
        if changed or more > number:
            number = more
            set_rates(now, number)
        moved[:] = False
        for d in range(devices):
            if stale[d] and ending[d] == INFINITY and position[d] < lengths[d]:
                ending[d] = started(d, orders[d, position[d]])
            stale[d] = False
        now = ending.min()
        for pair in active[:number]:
            now = min(now, drained[pair])
        if now == INFINITY:
            break
        for d in range(devices):
            if ending[d] > now:
                continue
            code = orders[d, position[d]]
            kind, stage = code & 3, stage_of[code >> 2]
            finish[code] = free[d] = now
            if kind == BOTH:
                finish[code - 2] = now
            sum_gradients(d, kind, stage, now, scatter, summed, queue)
            left_s[d] -= times[kind, stage] + (second_forward[stage] if kind in (INPUT, BOTH) else 0.0)
            ending[d], position[d] = INFINITY, position[d] + 1
            todo -= 1
            moved[d] = stale[d] = True
            if now + left_s[d] > stop:
                return INFINITY
        still = end_messages(now, number)
        changed, number = still < number, still
    return float(end_of_step(placement, count, costs, scratch)) if todo == 0 else -1.0


PREFETCH = 2
"""The default of ``lower``."""


class Messages(NamedTuple):
    """All messages of a step: those of each pair of devices in the order of their sends.

    Args:
        begins: offset of each pair's messages in the next five, (devices² + 1); pair a · devices + b.
        issued: position of the action whose end sends the message.
        posted: position that the receiver has to reach.
        source: code of the action that sends it.
        reader: entry of its reader in the last three: 2 · place, + 1 for a gradient.
        pending, arrived, why: per reader: messages still missing, the latest arrival, and the source of that one.
    """

    begins: Integers
    issued: Integers
    posted: Integers
    source: Integers
    reader: Integers
    size: Floats
    pending: Integers
    arrived: Floats
    why: Integers


@njit()
def all_messages(orders: Any, lengths: Any, count: int, placement: Any, costs: Any, where: Any) -> Any:
    """The messages of coded orders; ``where`` has the position of every action."""
    devices, stages = orders.shape[0], placement.shape[0]
    most, number = count * (costs.forward_first[stages] + costs.back_first[stages]), 0
    pairs, issued, posted = (
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
    )
    sources, readers, sizes = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64), np.empty(most)
    pending, begins = np.zeros(2 * stages * count, dtype=np.int64), np.zeros(devices * devices + 1, dtype=np.int64)
    for back in range(2):
        kind = INPUT if back else FORWARD
        first, edge_from = (costs.back_first, costs.back_from) if back else (costs.forward_first, costs.forward_from)
        edge_bytes = costs.back_bytes if back else costs.forward_bytes
        for stage in range(stages):
            for e in range(first[stage], first[stage + 1]):
                pair = placement[edge_from[e]] * devices + placement[stage]
                if pair % (devices + 1) == 0:  # of one device
                    continue
                for microbatch in range(count):
                    source, place = KINDS * (edge_from[e] * count + microbatch) + kind, stage * count + microbatch
                    pairs[number], issued[number], sources[number] = pair, where[source], source
                    posted[number], readers[number] = where[KINDS * place + kind], 2 * place + back
                    sizes[number] = edge_bytes[e]
                    pending[2 * place + back] += 1
                    begins[pair + 1] += 1
                    number += 1
    for pair in range(devices * devices):
        begins[pair + 1] += begins[pair]
    # In the order of sends; those of one action are in the order of their readers.
    sent = pairs[:number] * (orders.shape[1] + 1) + issued[:number]
    order = np.argsort(sent * pending.shape[0] + readers[:number])
    posted = posted[order]
    for pair in range(devices * devices):
        first_reader = lengths[pair % devices]
        for m in range(begins[pair + 1] - 1, begins[pair] - 1, -1):
            first_reader = min(first_reader, posted[m])
            posted[m] = max(0, first_reader - PREFETCH)
    return Messages(
        begins, issued[order], posted, sources[order], readers[order], sizes[order], pending,
        np.zeros(2 * stages * count), np.full(2 * stages * count, UNKNOWN, dtype=np.int64),
    )  # fmt: skip


class LinkArrays(NamedTuple):
    """The links that messages cross.

    Args:
        first: offset of the crossings of each pair of positions in ``link``, (devices² + 1); pair a · devices + b.
        link: number of each crossed link and direction, as often as it is crossed.
        capacity: bytes per second of each.
    """

    first: Integers
    link: Integers
    capacity: Floats


def link_arrays(cluster: Cluster, replicas: Sequence[Sequence[int]]) -> LinkArrays:
    """The links of all messages of some replicas; per replica the cluster's device at each position.

    Links that only one pair's messages cross are omitted: the path's rate includes their limit.
    """
    devices = len(replicas[0])
    numbers: dict[tuple[str, str, bool | None], int] = {}
    capacity: list[float] = []
    crossed: list[list[int]] = []
    for a in range(devices):
        for b in range(devices):
            own: list[int] = []
            for replica in replicas if a != b else ():
                for link, from_a in cluster.path(replica[a], replica[b]):
                    ways: list[tuple[bool | None, float]] = [(from_a, link.rate(from_a))]
                    if link.both_bytes_per_s is not None:
                        ways.append((None, link.both_bytes_per_s))
                    for way, rate in ways:
                        key = link.a, link.b, way
                        if key not in numbers:
                            numbers[key] = len(capacity)
                            capacity.append(rate)
                        own.append(numbers[key])
            crossed.append(own)
    pairs = np.zeros(len(capacity), dtype=np.int64)
    for own in crossed:
        for number in dict.fromkeys(own):
            pairs[number] += 1
    several = np.array([any(own.count(n) > 1 for own in crossed) for n in range(len(capacity))], dtype=np.bool_)
    kept = [[number for number in own if pairs[number] > 1 or several[number]] for own in crossed]
    first = np.concatenate([[0], np.cumsum([len(own) for own in kept])]).astype(np.int64)
    numbers_crossed = np.array([number for own in kept for number in own], dtype=np.int64)
    return LinkArrays(first, numbers_crossed, np.array(capacity, dtype=float))


def no_links(devices: int) -> LinkArrays:
    """The links of messages that never contend."""
    return LinkArrays(np.zeros(devices * devices + 1, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
