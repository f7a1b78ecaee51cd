"""Arrangements: the device of a cluster at each position of each replica's pipeline, for unequal links and memory.

The search tries several and scores each: a pipeline over consecutive devices of the cluster, with one replica after
another; replicas over consecutive devices; the same with neighbours in the pipeline near to each other (nearest
neighbour); and, if memory differs, devices with the most memory first, because a pipeline's
first stages hold the most microbatches.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from ...cluster.cluster import Cluster
from ...cluster.collectives import Operation, collective_s
from ...cluster.tensor_groups import GroupedCluster
from ...timing.coding import Floats

MESSAGE_BYTES = 16_000_000
"""Size of the message whose transfer time is the distance: an activation of some thousands of tokens."""
WORTH = 0.99
"""An order counts as nearer if its length is at most this share of the given order's."""
STARTS = 4
"""Number of devices from which a greedy order is started."""
GRADIENT_BYTES = 1 << 30
"""Size of the reduction from which the time per byte is computed."""

Replicas = tuple[tuple[int, ...], ...]
"""Per replica the cluster's device at each position of the pipeline."""


def arrangements(cluster: Cluster, pipeline: int, data: int) -> list[Replicas]:
    """Arrangements of ``data`` replicas of a pipeline on the first devices of a cluster, plain ones first."""
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
    """Seconds of a message between every two of the first devices, or of the first tensor ranks of groups."""
    places: Sequence[int] = range(count)
    if isinstance(cluster, GroupedCluster):  # to keep the paths of all ranks of all pairs would take gigabytes
        places, cluster = [group[0] for group in cluster.groups], cluster.single
    result = np.zeros((count, count))
    for a, b in itertools.permutations(range(count), 2):
        result[a, b] = cluster.transfer_s(places[a], places[b], MESSAGE_BYTES)
    return result


def nearest_order(distances: Floats, devices: Sequence[int]) -> tuple[int, ...]:
    """The devices in an order with short distances between neighbours; unchanged if the gain is small."""
    given = tuple(devices)
    found = [_greedy(distances, given, first) for first in given[:STARTS]]
    best = min(found, key=lambda order: _length(distances, order))
    return best if _length(distances, best) < WORTH * _length(distances, given) else given


def _length(distances: Floats, order: Sequence[int]) -> float:
    """Sum of the distances from each device to the next, and from the last to the first."""
    return sum(float(distances[a, b]) for a, b in zip(order, (*order[1:], order[0]), strict=True))


def _greedy(distances: Floats, devices: Sequence[int], first: int) -> tuple[int, ...]:
    order, left = [first], [device for device in devices if device != first]
    while left:
        order.append(min(left, key=lambda device: (distances[order[-1], device], device)))
        left.remove(order[-1])
    return tuple(order)


def reduction_rates(
    cluster: Cluster,
    replicas: Replicas,
    operation: Operation = Operation.ALL_REDUCE,
    sharing: int | None = None,
) -> Floats:
    """Fixed seconds and seconds per byte of a collective over the replicas at each position, (2, positions)."""
    result = np.zeros((2, len(replicas[0])))
    if len(replicas) > 1:
        for position in range(len(replicas[0])):
            members = [replica[position] for replica in replicas]
            least, large = (
                collective_s(cluster, members, size, operation, None, sharing) for size in (1.0, GRADIENT_BYTES)
            )
            each = max(large - least, 0.0) / (GRADIENT_BYTES - 1)
            result[:, position] = least - each, each
    return result
