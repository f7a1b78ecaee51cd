"""A cluster's structure for display: its nodes, their parts, and the network between them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import networkx
from attrs import evolve, frozen

from ..errors import RequestError
from .cluster import Cluster
from .routing import Link, path_latency_s, path_rate


@frozen
class Node:
    """Devices that are connected without the network, with their hubs.

    Args:
        prefix: the common prefix of its names, if there are several nodes.
        names: of its devices and hubs, in the order of the cluster.
        shape: equal for nodes that differ only in the prefix.
    """

    prefix: str
    names: tuple[str, ...]
    shape: object


@frozen
class LinkClass:
    """Links of one kind.

    Args:
        ends: the kinds of their two ends, such as ``device – pcie``.
        count: how many.
        bytes_per_s, latency_s: of each.
        back_bytes_per_s: from the second end to the first, where it differs.
    """

    ends: str
    count: int
    bytes_per_s: float
    latency_s: float
    back_bytes_per_s: float | None = None


@frozen
class PathClass:
    """Paths from one device over the same kinds of hubs at the same rate.

    Args:
        device: the destination of the first one; None for the device's host.
        count: how many.
        hubs: the names of the hubs on the first one.
        bytes_per_s: of its slowest link.
        latency_s: sum over its links.
    """

    device: int | None
    count: int
    hubs: tuple[str, ...]
    bytes_per_s: float
    latency_s: float


@frozen
class Topology:
    """A cluster's nodes and network.

    Args:
        kinds: of all devices (``device``) and hubs, by name.
        nodes: those with devices.
        network: the switches of the network in levels; those of the first one are linked to NICs.
        links: all links, by kind.
    """

    kinds: Mapping[str, str]
    nodes: tuple[Node, ...]
    network: tuple[tuple[str, ...], ...]
    links: tuple[LinkClass, ...]

    @property
    def groups(self) -> list[list[Node]]:
        """Equal nodes that follow each other are one group."""
        return [list(group) for _, group in groupby(self.nodes, key=lambda node: node.shape)]


def topology_of(cluster: Cluster) -> Topology:
    """A cluster's nodes and network: nodes are the connected components without the network's switches."""
    types = {device.name: device.type for device in cluster.devices}
    kinds = dict.fromkeys(types, "device") | {hub.name: hub.kind for hub in cluster.hubs}
    graph: networkx.Graph[str] = networkx.Graph()
    graph.add_nodes_from(kinds)
    graph.add_edges_from((link.a, link.b) for link in cluster.links)
    network = _network(graph, kinds)
    inside = networkx.Graph(graph.subgraph(set(kinds).difference(*network)))
    inside.remove_edges_from([(a, b) for a, b in inside.edges if kinds[a] == kinds[b] == "nic"])
    found = [set(part) for part in networkx.connected_components(inside) if not types.keys().isdisjoint(part)]
    parts = sorted([name for name in kinds if name in part] for part in found)
    parts.sort(key=lambda part: list(kinds).index(part[0]))

    def node(names: list[str]) -> Node:
        prefix = _prefix(names) if len(parts) > 1 else ""
        own = tuple((name.removeprefix(prefix), kinds[name], types.get(name)) for name in names)
        edges = frozenset(frozenset(end.removeprefix(prefix) for end in edge) for edge in inside.edges(names))
        return Node(prefix, tuple(names), (own, edges))

    return Topology(kinds, tuple(map(node, parts)), network, link_classes(cluster.links, kinds))


def link_classes(links: Iterable[Link], kinds: Mapping[str, str]) -> tuple[LinkClass, ...]:
    """Links by the kinds of their ends, their rate and latency, in the order of the first of each."""
    shown: Counter[LinkClass] = Counter()
    for link in links:
        ends = sorted((kinds[link.a], kinds[link.b]), key=_rank)
        first = kinds[link.a] == ends[0]
        rate, back = link.rate(first), link.rate(not first)
        shown[LinkClass(" – ".join(ends), 1, rate, link.latency_s, None if back == rate else back)] += 1
    return tuple(evolve(kind, count=count) for kind, count in shown.items())


def path_classes(cluster: Cluster, device: int = 0) -> tuple[PathClass, ...]:
    """Paths from a device to all others and to its host, grouped by the kinds of their hubs and by rate."""
    kinds = {hub.name: hub.kind for hub in cluster.hubs}
    memories = set(cluster.memories.values())
    found: dict[tuple[object, ...], PathClass] = {}
    for other in (*range(len(cluster.devices)), None):
        if other == device:
            continue
        try:
            path = cluster.host_path(device) if other is None else cluster.path(device, other)
        except RequestError:
            continue
        ends = tuple(link.b if forward else link.a for link, forward in path if link not in memories)
        hubs = ends[: None if other is None else -1]
        rate, latency_s = path_rate(path), path_latency_s(path)
        key = (other is None, *(kinds.get(hub) for hub in hubs), rate, latency_s)
        known = found.get(key)
        found[key] = evolve(known, count=known.count + 1) if known else PathClass(other, 1, hubs, rate, latency_s)
    return tuple(found.values())


def _rank(kind: str) -> int:
    return ("device", "pcie", "host", "nic", "switch").index(kind)


def _network(graph: "networkx.Graph[str]", kinds: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Switches without devices that a NIC reaches through switches alone, by the number of links to it."""
    levels: list[tuple[str, ...]] = []
    below = {name for name, kind in kinds.items() if kind == "nic"}
    while below:
        near = {other for name in below for other in graph[name]}.difference(*levels)
        alone = (name for name in kinds if name in near and kinds[name] == "switch")
        levels.append(tuple(name for name in alone if not any(kinds[other] == "device" for other in graph[name])))
        below = set(levels[-1])
    return tuple(level for level in levels if level)


def _prefix(names: Sequence[str]) -> str:
    """The common prefix of all names, up to its last punctuation character."""
    first, last = min(names), max(names)
    length = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(map(len, names)))
    return first[: max((at + 1 for at in range(length) if first[at] in "./:-_"), default=0)]
