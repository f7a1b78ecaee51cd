"""The links that messages between positions of a pipeline cross, in arrays for `contended`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..cluster.cluster import Cluster
from .coding import Floats, Integers


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
