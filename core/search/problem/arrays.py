"""A graph and a cluster as arrays for the compiled search: prefix sums, whose differences are stage costs."""

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...cluster.cluster import Cluster
from ...cluster.collectives import Operation
from ...cluster.routing import path_latency_s, path_rate
from ...costs.costs import EMPTY_GRADIENT_BYTES
from ...costs.graph import OpGraph
from ...costs.message_overhead import FREE, MessageLine
from ...policies.sharding import NONE, part_of_gradients, part_of_parameters
from ...timing.coding import Floats, Integers
from ...timing.contended import LinkArrays, link_arrays, no_links
from .arrangements import Replicas, reduction_rates
from .assemble import parameter_bytes, replica_share

OPTIMIZER, STATE, SAVED, GRADIENT_BYTES, PARAMETER_BYTES, GATHERED = 3, 4, 5, 6, 7, 8
"""Rows of ``GraphArrays.sums`` after those of F, I and W."""
SUMS = (
    "forward_s",
    "backward_input_s",
    "backward_weight_s",
    "optimizer_s",
    "resident_bytes",
    "saved_bytes",
    "gradient_bytes",
    "held_parameter_bytes",
)
"""The rows but the last, which is of parameters that are gathered while their stage computes (`of_one_replica`)."""


class GraphArrays(NamedTuple):
    """A graph, with costs for each type of device.

    Args:
        sums: prefix sums over the nodes, (types, 9, nodes + 1).
        largest: the largest workspace of the 2^k nodes from each on, (types, levels, nodes).
        source: producer of each tensor that has readers, ascending.
        first: offset of each tensor's readers in the next three, (tensors + 1).
        reader, size, back: node, bytes, and bytes of the returned gradient, ascending by node.
        shared_first: offset of the readers of each shared parameter, (parameters + 1).
        shared_reader: nodes, ascending.
        shared_size, shared_gradient: bytes of a copy's state, and of its gradient, by parameter.
    """

    sums: Floats
    largest: Floats
    source: Integers
    first: Integers
    reader: Integers
    size: Floats
    back: Floats
    shared_first: Integers
    shared_reader: Integers
    shared_size: Floats
    shared_gradient: Floats


class MachineArrays(NamedTuple):
    """A cluster by pipeline position.

    Args:
        kind: index of each device's type in the graph's types.
        limits: bytes that each device may hold.
        latency, rate: of every path in seconds and bytes per second, (devices, devices).
        reduce: fixed seconds and seconds per byte of the reduction of a stage's gradients over the data dimension,
            (2, devices).
        scatter, gather: the same of the sum of a microbatch's gradients, and of the gather of a stage's parameters,
            (2, devices); (2, 0) where what the replicas share needs none.
        message: fixed seconds and seconds per byte that a message takes on each of its two devices, (2).
        links: the links that messages share; without any if they are pure delays.
        contended: whether a step is timed with messages that share links.
    """

    kind: Integers
    limits: Floats
    latency: Floats
    rate: Floats
    reduce: Floats
    scatter: Floats
    gather: Floats
    message: Floats
    links: LinkArrays
    contended: bool


def graph_arrays(graphs: Sequence[OpGraph], sizes: Mapping[str, int] | None = None) -> GraphArrays:
    """The arrays of graphs that differ only in costs, one for each type of device."""
    first = graphs[0]
    count = len(first.nodes)
    sums = np.zeros((len(graphs), GATHERED + 1, count + 1))
    for t, graph in enumerate(graphs):
        for row, name in enumerate(SUMS):
            np.cumsum([getattr(node, name) for node in graph.nodes], out=sums[t, row, 1:])
    return GraphArrays(sums, _largest(graphs), *_tensors(first), *_shared(first, sizes))


def _largest(graphs: Sequence[OpGraph]) -> Floats:
    count = len(graphs[0].nodes)
    levels = max(count.bit_length(), 1)
    table = np.zeros((len(graphs), levels, count))
    table[:, 0] = [[node.workspace_bytes for node in graph.nodes] for graph in graphs]
    for level in range(1, levels):
        half = 1 << (level - 1)
        table[:, level] = table[:, level - 1]
        table[:, level, : count - half] = np.maximum(table[:, level - 1, : count - half], table[:, level - 1, half:])
    return table


def _tensors(graph: OpGraph) -> tuple[Integers, Integers, Integers, Floats, Floats]:
    found: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    for edge in graph.edges:
        readers = found.setdefault((graph.index[edge.src], edge.tensor), {})
        node = graph.index[edge.dst]
        size, back = readers.get(node, (0, 0))
        gradient = max(edge.bytes, EMPTY_GRADIENT_BYTES) if edge.gradient else 0
        readers[node] = max(size, edge.bytes), max(back, gradient)
    source, first, rows = [], [0], []
    for (node, _), readers in sorted(found.items()):
        source.append(node)
        rows += [(reader, *readers[reader]) for reader in sorted(readers)]
        first.append(len(rows))
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return (
        np.array(source, dtype=np.int64), np.array(first, dtype=np.int64), np.array(columns[0], dtype=np.int64),
        np.array(columns[1], dtype=float), np.array(columns[2], dtype=float),
    )  # fmt: skip


def _shared(graph: OpGraph, sizes: Mapping[str, int] | None) -> tuple[Integers, Integers, Floats, Floats]:
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        for name in node.parameters:
            readers.setdefault(name, []).append(i)
    first, rows, found = [0], [], []
    share = replica_share(graph)
    for name, nodes in readers.items():
        if len(nodes) > 1:
            size = parameter_bytes(graph, name, sizes)
            rows += nodes
            first.append(len(rows))
            found.append((size, 0) if name in graph.frozen else (2 * size + round(share * size), size))
    state, gradient = np.array(found, dtype=float).reshape(-1, 2).T
    return (
        np.array(first, dtype=np.int64), np.array(rows, dtype=np.int64), np.ascontiguousarray(state),
        np.ascontiguousarray(gradient),
    )  # fmt: skip


@lru_cache(maxsize=64)
def machine_arrays(
    cluster: Cluster,
    replicas: Replicas,
    limits: tuple[float, ...],
    kinds: tuple[int, ...],
    message: MessageLine = FREE,
    contended: bool = False,
    shard: str = NONE,
    sharing: int | None = None,
) -> MachineArrays:
    """The arrays of pipelines on some of a cluster's devices; ``limits`` and ``kinds`` by position.

    Replicas share what ``shard`` says (see ``policies/sharding``), in groups of ``sharing``.

    The latency and rate between two positions are the worst over the replicas.
    """
    count = len(replicas[0])
    latency, rate = np.zeros((count, count)), np.full((count, count), np.inf)
    for a, b in itertools.permutations(range(count), 2):
        for replica in replicas:
            path = cluster.path(replica[a], replica[b])
            latency[a, b] = max(latency[a, b], path_latency_s(path))
            rate[a, b] = min(rate[a, b], path_rate(path))
    reduce, scatter, gather = _over_replicas(cluster, replicas, shard if len(replicas) > 1 else NONE, sharing)
    return MachineArrays(
        np.array(kinds, dtype=np.int64), np.array(limits, dtype=float), latency, rate, reduce, scatter, gather,
        np.array([message.least_s, message.s_per_byte]),
        link_arrays(cluster, replicas) if contended else no_links(count), contended,
    )  # fmt: skip


def _over_replicas(
    cluster: Cluster, replicas: Replicas, shard: str, sharing: int | None
) -> tuple[Floats, Floats, Floats]:
    """``reduce``, ``scatter`` and ``gather`` of the machine; of gradients that microbatches sum nothing is left, and
    shared parameters are not gathered after the optimizer."""
    none = np.zeros((2, 0))
    if shard == NONE:
        return reduction_rates(cluster, replicas), none, none
    summed = reduction_rates(cluster, replicas, Operation.REDUCE_SCATTER, sharing)
    gather = reduction_rates(cluster, replicas, Operation.ALL_GATHER, sharing)
    if part_of_gradients(shard):
        return np.zeros_like(summed), summed, none if part_of_parameters(shard) else gather
    return summed, none, gather


def of_one_replica(arrays: GraphArrays, whole: GraphArrays, replicas: int, shard: str) -> GraphArrays:
    """The arrays of graphs that have the costs of one replica, with what replicas sum.

    Replicas sum whole gradients. A copy of a parameter that several stages read is as large as its gradient, or has
    none if the parameter is frozen; the rest of its state is the optimizer's.

    Args:
        arrays: of the costs of one replica.
        whole: of those of a whole stage.
        replicas: how many there are.
    """
    sums, gradient = arrays.sums.copy(), whole.shared_gradient
    sums[:, GRADIENT_BYTES] = whole.sums[:, GRADIENT_BYTES]
    optimizer = np.where(gradient > 0, whole.shared_size - 2 * gradient, 0.0)
    held = np.where(gradient > 0, gradient, whole.shared_size)
    part = np.ceil(gradient / replicas)
    own = part if part_of_gradients(shard) else gradient
    if part_of_parameters(shard):
        sums[:, GATHERED] = whole.sums[:, PARAMETER_BYTES]
        held = np.ceil(held / replicas)
    size = held + own + np.ceil(optimizer / replicas)
    return arrays._replace(sums=sums, shared_size=size, shared_gradient=gradient)
