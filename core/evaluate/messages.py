"""The messages of coded orders, in the order of their sends, with the positions where their receives are posted.

A receive is posted as lowering places it: ``PREFETCH`` compute actions before its reader, and earlier where the order
of its queue requires it.
"""

from typing import Any, NamedTuple

import numpy as np

from ..numba_cache import njit
from .coding import FORWARD, INPUT, KINDS, WEIGHT, Floats, Integers
from .compiled import UNKNOWN

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
        size: bytes.
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
def _by_source(first: Any, sources: Any, stages: int) -> tuple[Any, Any, Any]:
    """The edges by their source: offsets, the reader of each, and its number among the edges by reader."""
    begins = np.zeros(stages + 1, dtype=np.int64)
    total = first[stages]
    for e in range(total):
        begins[sources[e] + 1] += 1
    for s in range(stages):
        begins[s + 1] += begins[s]
    at = begins.copy()
    readers, numbers = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    for s in range(stages):
        for e in range(first[s], first[s + 1]):
            readers[at[sources[e]]], numbers[at[sources[e]]] = s, e
            at[sources[e]] += 1
    return begins, readers, numbers


@njit()
def _count_messages(first: Any, sources: Any, placement: Any, count: int, devices: int, sizes: Any) -> None:
    """Add the messages of some edges to ``sizes``, by pair + 1."""
    for s in range(placement.shape[0]):
        for e in range(first[s], first[s + 1]):
            a, b = placement[sources[e]], placement[s]
            if a != b:
                sizes[a * devices + b + 1] += count


@njit()
def _send(m: int, i: int, source: int, reader: int, read_at: int, size: float, messages: Any) -> None:
    """Fill in message ``m``; its receive is not placed yet."""
    messages.issued[m], messages.posted[m], messages.source[m] = i, read_at, source
    messages.reader[m], messages.size[m] = reader, size
    messages.pending[reader] += 1


@njit()
def all_messages(orders: Any, lengths: Any, count: int, placement: Any, costs: Any, scratch: Any) -> Any:
    """The messages of coded orders; ``scratch.where`` has the position of every action."""
    devices, stages, where = orders.shape[0], placement.shape[0], scratch.where
    begins = np.zeros(devices * devices + 1, dtype=np.int64)
    _count_messages(costs.forward_first, costs.forward_from, placement, count, devices, begins)
    _count_messages(costs.back_first, costs.back_from, placement, count, devices, begins)
    for pair in range(devices * devices):
        begins[pair + 1] += begins[pair]
    total, fill, readers = begins[devices * devices], begins.copy(), 2 * stages * count
    messages = Messages(
        begins, np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64),
        np.empty(total, dtype=np.int64), np.empty(total), np.zeros(readers, dtype=np.int64), np.zeros(readers),
        np.full(readers, UNKNOWN, dtype=np.int64),
    )  # fmt: skip
    to_first, to_reader, to_edge = _by_source(costs.forward_first, costs.forward_from, stages)
    back_first, back_reader, back_edge = _by_source(costs.back_first, costs.back_from, stages)
    for d in range(devices):
        for i in range(lengths[d]):
            code = orders[d, i]
            place, stage = code >> 2, scratch.stage_of[code >> 2]
            if code & 3 == FORWARD:
                for e in range(to_first[stage], to_first[stage + 1]):
                    pair, other = d * devices + placement[to_reader[e]], place + (to_reader[e] - stage) * count
                    if pair != d * devices + d:
                        _send(fill[pair], i, code, 2 * other, where[KINDS * other], costs.forward_bytes[to_edge[e]],
                              messages)  # fmt: skip
                        fill[pair] += 1
            elif code & 3 != WEIGHT:
                for e in range(back_first[stage], back_first[stage + 1]):
                    pair, other = d * devices + placement[back_reader[e]], place + (back_reader[e] - stage) * count
                    if pair != d * devices + d:
                        _send(fill[pair], i, KINDS * place + INPUT, 2 * other + 1, where[KINDS * other + INPUT],
                              costs.back_bytes[back_edge[e]], messages)  # fmt: skip
                        fill[pair] += 1
    for pair in range(devices * devices):
        first_reader = lengths[pair % devices]
        for m in range(begins[pair + 1] - 1, begins[pair] - 1, -1):
            first_reader = min(first_reader, messages.posted[m])
            messages.posted[m] = max(0, first_reader - PREFETCH)
    return messages
