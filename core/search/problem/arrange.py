"""Which device of a cluster stands where: replicas of pipelines on devices that are not all equally near to each other.

Orders to try, each to be searched and scored like any other choice: a pipeline over devices that follow one another
in the cluster, with replicas side by side, or the other way round; the same with neighbours in the pipeline as near as
they can be (nearest neighbour, then 2-opt; Croes 1958); and, where memory differs, those with the most of it first,
because a pipeline's first stages hold the most microbatches.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from ...cluster.cluster import Cluster
from ...cluster.collectives import collective_s
from ...evaluate.coding import Floats

MESSAGE_BYTES = 16_000_000
"""Of the message by which distances are compared: an activation of some thousands of tokens."""
WORTH = 0.99
"""An order counts as nearer if its distances are at most this share of what they were."""
STARTS = 4
"""Devices that a greedy order begins with, in turn."""
GRADIENT_BYTES = 1 << 30
"""Of the reduction by which the rate of larger and smaller ones is told."""

Replicas = tuple[tuple[int, ...], ...]
"""Per replica the cluster's device at each position of the pipeline."""


def arrangements(cluster: Cluster, pipeline: int, data: int) -> list[Replicas]:
    """Ways to put ``data`` replicas of a pipeline on the first devices of a cluster, plain ones first."""
    count = pipeline * data
    blocks = tuple(tuple(range(r * pipeline, (r + 1) * pipeline)) for r in range(data))
    strided = tuple(tuple(range(r, count, data)) for r in range(data))
    found = [blocks, strided]
    distances = _distances(cluster, count)
    if not np.allclose(distances[~np.eye(count, dtype=bool)], distances[0, -1]):
        found += [tuple(nearest_order(distances, replica) for replica in each) for each in (blocks, strided)]
    memory = [cluster.devices[device].memory_bytes for device in range(count)]
    if len(set(memory)) > 1:
        found += [tuple(tuple(sorted(r, key=lambda d: (-memory[d], d))) for r in each) for each in (blocks, strided)]
    return list(dict.fromkeys(found))


def _distances(cluster: Cluster, count: int) -> Floats:
    """Seconds of a message between every two of the first devices."""
    result = np.zeros((count, count))
    for a, b in itertools.permutations(range(count), 2):
        result[a, b] = cluster.transfer_s(a, b, MESSAGE_BYTES)
    return result


def nearest_order(distances: Floats, devices: Sequence[int]) -> tuple[int, ...]:
    """The devices in an order in which neighbours are near, as they are where that is about as good."""
    given = tuple(devices)
    found = [_improved(distances, _greedy(distances, given, first)) for first in given[:STARTS]]
    best = min(found, key=lambda order: _length(distances, order))
    return best if _length(distances, best) < WORTH * _length(distances, given) else given


def _length(distances: Floats, order: Sequence[int]) -> float:
    """How far it is from each device to the next, and from the last back to the first."""
    return sum(float(distances[a, b]) for a, b in zip(order, (*order[1:], order[0]), strict=True))


def _greedy(distances: Floats, devices: Sequence[int], first: int) -> tuple[int, ...]:
    order, left = [first], [device for device in devices if device != first]
    while left:
        order.append(min(left, key=lambda device: (distances[order[-1], device], device)))
        left.remove(order[-1])
    return tuple(order)


def _improved(distances: Floats, order: tuple[int, ...]) -> tuple[int, ...]:
    """Turn parts of the order around while that makes it shorter."""
    better = True
    while better:
        better = False
        for i, j in itertools.combinations(range(1, len(order)), 2):
            before, first, last, after = order[i - 1], order[i], order[j], order[(j + 1) % len(order)]
            now = distances[before, first] + distances[last, after]
            if distances[before, last] + distances[first, after] < now * (1 - 1e-9):
                order, better = (*order[:i], *reversed(order[i : j + 1]), *order[j + 1 :]), True
    return order


def reduction_rates(cluster: Cluster, replicas: Replicas) -> Floats:
    """Of the gradients' all-reduce at each position: seconds for any, and for each byte, (2, positions)."""
    result = np.zeros((2, len(replicas[0])))
    if len(replicas) > 1:
        for position in range(len(replicas[0])):
            members = [replica[position] for replica in replicas]
            least, large = (collective_s(cluster, members, size) for size in (1.0, GRADIENT_BYTES))
            each = max(large - least, 0.0) / (GRADIENT_BYTES - 1)
            result[:, position] = least - each, each
    return result
