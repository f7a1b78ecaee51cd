"""Cuts of a graph's order into stages, and what the devices that hold these may hold."""

from collections.abc import Sequence
from itertools import pairwise

from ..cluster.cluster import Cluster
from ..errors import RequestError
from .graph import OpGraph

Cuts = tuple[int, ...]
"""Where stages begin in the graph's order, from 0, with the number of nodes at the end: stage s holds nodes
``cuts[s]`` to ``cuts[s + 1] - 1``."""


def stages_of(graph: OpGraph, cuts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Names of the nodes of each stage."""
    return tuple(tuple(node.name for node in graph.nodes[start:end]) for start, end in pairwise(cuts))


def device_limits(cluster: Cluster, memory_limit: float | None = None) -> tuple[float, ...]:
    """Bytes that each device may hold: its memory, or ``memory_limit`` where that is less.

    Raises:
        RequestError: the limit is not above 0.
    """
    if memory_limit is not None and not memory_limit > 0:
        raise RequestError(f"a memory limit of {memory_limit} bytes: it must be above 0")
    return tuple(min(device.memory_bytes, memory_limit or device.memory_bytes) for device in cluster.devices)
