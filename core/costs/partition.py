"""Cuts of a graph's order into stages, and the memory limits of devices."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..cluster.cluster import Cluster
from ..errors import RequestError
from .graph import OpGraph

Cuts = tuple[int, ...]
"""The first node of each stage in the graph's order, from 0, then the number of nodes: stage s has nodes
``cuts[s]`` to ``cuts[s + 1] - 1``."""


def stages_of(graph: OpGraph, cuts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Names of the nodes of each stage."""
    return tuple(tuple(node.name for node in graph.nodes[start:end]) for start, end in pairwise(cuts))


def boundary_bytes(graph: OpGraph) -> tuple[int, ...]:
    """Bytes of the tensors that cross the position after each node; a tensor with several readers counts once."""
    crossing: dict[tuple[str, int], tuple[int, int]] = {}  # a tensor's last reader, and its size
    for edge in graph.edges:
        reader, size = crossing.get((edge.src, edge.tensor), (0, 0))
        crossing[edge.src, edge.tensor] = max(reader, graph.index[edge.dst]), max(size, edge.bytes)
    change = [0] * len(graph.nodes)
    for (source, _), (reader, size) in crossing.items():
        change[graph.index[source]] += size
        change[reader] -= size
    return tuple(accumulate(change))


def device_limits(cluster: Cluster, memory_limit: float | None = None) -> tuple[float, ...]:
    """Bytes that each device may use: its memory, or ``memory_limit`` if that is less.

    Raises:
        RequestError: the limit is not above 0.
    """
    if memory_limit is not None and not memory_limit > 0:
        raise RequestError(f"the memory limit is {memory_limit} bytes: it must be above 0")
    return tuple(min(device.memory_bytes, memory_limit or device.memory_bytes) for device in cluster.devices)
