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


# Rows of arrays, and not arrays of a tuple: numba counts a reference at each access to these, which made a run take
# twice as long.
ACTIVE, FOLLOWING, FLOWING, GROWING = range(4)
"""Rows of the queues, by pair of devices (a · devices + b): in the first entries the pairs with a message in transit,
in the order in which these started; the message in transit, or the next one to start; whether one is in transit; and,
while rates are computed, the pairs whose rates still grow."""
LEFT, RATE, SINCE, DRAINED, FAIR = range(5)
"""Rows of the flows, by pair: bytes of its message left at time ``SINCE``, its bytes per second from then on, when it
has drained at this rate (infinite without a message), and the fair rate while rates are computed."""
CAPACITY, SPARE, SHARE, CROSSING = range(4)
"""Rows of the links: bytes per second, those not given away yet, those for each message, and how many cross it."""
ISSUED, POSTED, SOURCE, READER = range(4)
"""Rows of the messages: position of the action whose end sends it, position that the receiver has to reach, code of
the action that sends it, and the entry of its reader (2 · place, + 1 for a gradient)."""
PENDING, WHY = range(2)
"""Rows of the readers: messages still missing, and the source of the one that arrived last."""


@njit()
def run_contended(
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

    From one event to the next:

    1. Messages start that are sent and whose receives are posted.
    2. If messages have started or ended, those in transit get their fair rates.
    3. Devices start their next actions, if the inputs are there.
    4. The next event is the first end of an action, or of the draining of a message.
    5. Actions end.
    6. Messages that have drained end.

    Args:
        latency, rate: of the path of every pair of devices, (devices, devices).
        links: :class:`LinkArrays`.
    """
    devices, pairs = orders.shape[0], orders.shape[0] * orders.shape[0]
    finish, free, position, left_s = scratch.finish, scratch.free, scratch.place, scratch.left
    summed, queue, stage_of, cause = scratch.summed, scratch.queue, scratch.stage_of, scratch.cause
    times, second_forward, scatter = costs.times, costs.second_forward, costs.scatter
    finish[:], free[:], position[:], left_s[:] = -1.0, 0.0, 0, work
    summed[:], queue[:] = 0.0, 0.0
    _fill_where(orders, lengths, scratch.where)
    begins, sent, sizes, readers = all_messages(orders, lengths, count, placement, costs, scratch.where)
    queues, flows, arrived = np.zeros((4, pairs), dtype=np.int64), np.zeros((5, pairs)), np.zeros(readers.shape[1])
    queues[FOLLOWING], flows[DRAINED] = begins[:pairs], INFINITY
    shared = np.empty((4, links.capacity.shape[0]))
    shared[CAPACITY] = links.capacity
    # Devices on which an action or a message has ended, and devices that may have another input.
    moved, stale = np.ones(devices, dtype=np.bool_), np.ones(devices, dtype=np.bool_)
    ending = np.full(devices, INFINITY)
    number, todo, now, changed = 0, lengths.sum(), 0.0, False
    while True:
        more = _start_messages(now, number, position, moved, begins, sent, sizes, queues, flows)
        if changed or more > number:
            number = more
            _set_rates(now, number, rate, links.first, links.link, shared, queues, flows)
        moved[:] = False
        for d in range(devices):
            if stale[d] and ending[d] == INFINITY and position[d] < lengths[d]:
                code = orders[d, position[d]]
                kind, stage = code & 3, stage_of[code >> 2]
                if _local_inputs(d, kind, code >> 2, stage, count, placement, costs, finish):
                    at = _begin(free[d], code, stage, second_forward, readers, arrived, summed, cause)
                    ending[d] = at + times[kind, stage]
            stale[d] = False
        now = ending.min()
        for pair in queues[ACTIVE, :number]:
            now = min(now, flows[DRAINED, pair])
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
        still = _end_messages(now, number, latency, moved, stale, sent, queues, flows, readers, arrived)
        changed, number = still < number, still
    return float(end_of_step(placement, count, costs, scratch)) if todo == 0 else -1.0


@njit(inline="always")
def _start_messages(
    now: float, number: int, position: Any, moved: Any, begins: Any, sent: Any, sizes: Any, queues: Any, flows: Any
) -> int:
    """Start the messages that are sent and whose receives are posted; the number of messages then in transit."""
    devices = position.shape[0]
    for pair in range(queues.shape[1]):
        a, b, m = pair // devices, pair % devices, queues[FOLLOWING, pair]
        if queues[FLOWING, pair] or m == begins[pair + 1] or not (moved[a] or moved[b]):
            continue
        if sent[ISSUED, m] < position[a] and sent[POSTED, m] <= position[b]:
            queues[FLOWING, pair], queues[ACTIVE, number] = 1, pair
            flows[LEFT, pair], flows[RATE, pair], flows[SINCE, pair] = sizes[m], 0.0, now
            number += 1
    return number


@njit(inline="always")
def _set_rates(
    now: float, number: int, rate: Any, first: Any, link_of: Any, links: Any, queues: Any, flows: Any
) -> None:
    """Give every message in transit its fair rate from now on."""
    _fill_fair_rates(number, rate, first, link_of, links, queues, flows)
    for pair in queues[ACTIVE, :number]:
        fair, current, since = flows[FAIR, pair], flows[RATE, pair], flows[SINCE, pair]
        if fair != current:
            if now > since:
                flows[LEFT, pair] = max(flows[LEFT, pair] - current * (now - since), 0.0)
            flows[RATE, pair], flows[SINCE, pair] = fair, now
            flows[DRAINED, pair] = now + flows[LEFT, pair] / fair


@njit(inline="always")
def _fill_fair_rates(number: int, rate: Any, first: Any, link_of: Any, links: Any, queues: Any, flows: Any) -> None:
    """The max-min fair rates of the active pairs, by progressive filling, as in ``simulators/network``."""
    devices = rate.shape[0]
    queues[GROWING, :number], links[SPARE] = queues[ACTIVE, :number], links[CAPACITY]
    while number > 0:
        links[CROSSING] = 0.0
        level = INFINITY
        for pair in queues[GROWING, :number]:
            level = min(level, rate[pair // devices, pair % devices])
            for link in link_of[first[pair] : first[pair + 1]]:
                links[CROSSING, link] += 1.0
        for link in range(links.shape[1]):
            crossing = links[CROSSING, link]
            links[SHARE, link] = links[SPARE, link] / crossing if crossing > 0 else INFINITY
            level = min(level, links[SHARE, link])
        kept = 0
        for pair in queues[GROWING, :number]:
            full = rate[pair // devices, pair % devices] <= level
            for link in link_of[first[pair] : first[pair + 1]]:
                full = full or links[SHARE, link] <= level
            if full:
                flows[FAIR, pair] = level
                for link in link_of[first[pair] : first[pair + 1]]:
                    links[SPARE, link] -= level
            else:
                queues[GROWING, kept] = pair
                kept += 1
        number = kept


@njit(inline="always")
def _begin(
    now: float, code: int, stage: int, second_forward: Any, readers: Any, arrived: Any, summed: Any, cause: Any
) -> float:
    """When a device that is free ``now`` can start an action, whose ``cause`` is filled; infinite while a message is
    missing."""
    kind, at, why = code & 3, now, UNKNOWN
    if kind != WEIGHT:
        reader = 2 * (code >> 2) + (0 if kind == FORWARD else 1)
        if readers[PENDING, reader] > 0:
            return INFINITY
        if kind != FORWARD:
            at += second_forward[stage]
        if arrived[reader] > at:
            at, why = arrived[reader], readers[WHY, reader]
    if kind in (WEIGHT, BOTH) and summed[stage] > at:
        at, why = summed[stage], UNKNOWN
    cause[code] = why
    if kind == BOTH:
        cause[code - 2] = why
    return at


@njit(inline="always")
def _end_messages(
    now: float, number: int, latency: Any, moved: Any, stale: Any, sent: Any, queues: Any, flows: Any,
    readers: Any, arrived: Any,
) -> int:  # fmt: skip
    """End the messages that have drained; the number of messages still in transit."""
    kept, devices = 0, latency.shape[0]
    for pair in queues[ACTIVE, :number]:
        if flows[DRAINED, pair] > now:
            queues[ACTIVE, kept] = pair
            kept += 1
            continue
        m, a, b = queues[FOLLOWING, pair], pair // devices, pair % devices
        reader, at = sent[READER, m], now + latency[a, b]
        queues[FOLLOWING, pair], queues[FLOWING, pair], flows[DRAINED, pair] = m + 1, 0, INFINITY
        readers[PENDING, reader] -= 1
        if at >= arrived[reader]:
            arrived[reader], readers[WHY, reader] = at, sent[SOURCE, m]
        moved[a] = stale[b] = True
    return kept


PREFETCH = 2
"""The default of ``lower``."""


@njit()
def all_messages(
    orders: Any, lengths: Any, count: int, placement: Any, costs: Any, where: Any
) -> tuple[Any, Any, Any, Any]:
    """The messages of coded orders: those of each pair of devices in the order of their sends.

    Args:
        where: position of every action.

    Returns:
        Offset of each pair's messages, (devices² + 1); the messages' rows, and their bytes; the readers' rows.
    """
    devices, stages = orders.shape[0], placement.shape[0]
    most, number = count * (costs.forward_first[stages] + costs.back_first[stages]), 0
    sent, sizes, keys = np.empty((4, most), dtype=np.int64), np.empty(most), np.empty(most, dtype=np.int64)
    readers, begins = np.zeros((2, 2 * stages * count), dtype=np.int64), np.zeros(devices * devices + 1, dtype=np.int64)
    readers[WHY] = UNKNOWN
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
                    reader = 2 * place + back
                    sent[ISSUED, number], sent[SOURCE, number], sent[READER, number] = where[source], source, reader
                    sent[POSTED, number], sizes[number] = where[KINDS * place + kind], edge_bytes[e]
                    # In the order of sends; those of one action are in the order of their readers.
                    issued = pair * (orders.shape[1] + 1) + where[source]
                    keys[number] = issued * readers.shape[1] + reader
                    readers[PENDING, reader] += 1
                    begins[pair + 1] += 1
                    number += 1
    order = np.argsort(keys[:number])
    sent, sizes = sent[:, order], sizes[order]
    for pair in range(devices * devices):
        begins[pair + 1] += begins[pair]
        first_reader = lengths[pair % devices]
        for m in range(begins[pair + 1] - 1, begins[pair] - 1, -1):
            first_reader = min(first_reader, sent[POSTED, m])
            sent[POSTED, m] = max(0, first_reader - PREFETCH)
    return begins, sent, sizes, readers


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
