"""A cluster's structure for display: its nodes, their parts, and the network between them."""

from collections import Counter
from collections.abc import Iterable, Sequence

import networkx
from attrs import evolve, frozen

from ..errors import RequestError
from .cluster import Cluster
from .routing import Link, path_latency_s, path_rate


@frozen
class Branch:
    """The devices and NICs of a PCIe switch, or a device that is linked to the host directly.

    Args:
        pcie: the switch; None for a device that is linked to the host directly.
        devices: their positions in the node.
        nics: their names.
        host: the host that it is linked to; None if there is none.
    """

    pcie: str | None
    devices: tuple[int, ...]
    nics: tuple[str, ...]
    host: str | None


@frozen
class NodeView:
    """One node.

    Args:
        prefix: the common prefix of its names, if there are several nodes; the names below are without it.
        numbers: its devices' numbers in the cluster.
        devices: their names.
        switches: the switches between devices, such as NVSwitch, each with the positions of its devices.
        bridges: pairs of positions that are linked directly.
        branches: the branches, in the order of their devices.
        hosts: the hosts, in the order of the cluster.
        host_links: pairs of hosts.
        drawn: whether these fields describe the whole node. If not (other links exist), only its links are listed.
    """

    prefix: str
    numbers: tuple[int, ...]
    devices: tuple[str, ...]
    switches: tuple[tuple[str, tuple[int, ...]], ...]
    bridges: tuple[tuple[int, int], ...]
    branches: tuple[Branch, ...]
    hosts: tuple[str, ...]
    host_links: tuple[tuple[str, str], ...]
    drawn: bool

    def like(self, other: "NodeView", types: Sequence[str | None]) -> bool:
        """Whether the two differ only in the numbers of their devices."""
        ours, theirs = ([types[number] for number in node.numbers] for node in (self, other))
        fields = ("devices", "switches", "bridges", "branches", "hosts", "host_links", "drawn")
        return ours == theirs and all(getattr(self, name) == getattr(other, name) for name in fields)


@frozen
class Rail:
    """A switch of the network and its NICs.

    Args:
        switch: its name.
        nics: by node, without the node's prefix.
        up: the switches that it is linked to.
    """

    switch: str
    nics: tuple[tuple[str, ...], ...]
    up: tuple[str, ...]


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
        names: of the nodes: the common prefix of a node's names, or a number.
        nodes: those with devices.
        rails: the switches of the network.
        links: all links, by kind.
    """

    names: tuple[str, ...]
    nodes: tuple[NodeView, ...]
    rails: tuple[Rail, ...]
    links: tuple[LinkClass, ...]

    def groups(self, types: Sequence[str | None]) -> list[list[int]]:
        """Numbers of nodes; equal nodes that follow each other are one group. ``types`` are the devices' types."""
        groups: list[list[int]] = []
        for number, node in enumerate(self.nodes):
            if groups and self.nodes[groups[-1][0]].like(node, types):
                groups[-1].append(number)
            else:
                groups.append([number])
        return groups


def topology_of(cluster: Cluster) -> Topology:
    """A cluster's nodes and network: nodes are the connected components without the network's switches."""
    kinds = {device.name: "device" for device in cluster.devices} | {hub.name: hub.kind for hub in cluster.hubs}
    graph: networkx.Graph[str] = networkx.Graph()
    graph.add_nodes_from(kinds)
    graph.add_edges_from((link.a, link.b) for link in cluster.links)
    order = {name: number for number, name in enumerate(kinds)}
    network = _network(graph, kinds)
    inside = graph.subgraph(name for name in kinds if name not in network)
    inside = networkx.Graph(inside)
    inside.remove_edges_from([(a, b) for a, b in inside.edges if kinds[a] == kinds[b] == "nic"])
    parts = [sorted(part, key=order.__getitem__) for part in networkx.connected_components(inside)]
    parts = sorted((part for part in parts if kinds[part[0]] == "device"), key=lambda part: order[part[0]])
    prefixes = [_prefix(part) if len(parts) > 1 else "" for part in parts]
    nodes = tuple(_node(part, prefix, inside, kinds, order) for part, prefix in zip(parts, prefixes, strict=True))
    names = tuple(prefix.rstrip("./:-_") or f"node {number}" for number, prefix in enumerate(prefixes))
    rails = tuple(_rail(name, parts, prefixes, graph, kinds, network) for name in kinds if name in network)
    return Topology(names, nodes, rails, link_classes(cluster.links, kinds))


def link_classes(links: Iterable[Link], kinds: dict[str, str]) -> tuple[LinkClass, ...]:
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


def _network(graph: "networkx.Graph[str]", kinds: dict[str, str]) -> set[str]:
    """Switches without devices that a NIC reaches through switches alone."""
    found: set[str] = set()
    frontier = [name for name, kind in kinds.items() if kind == "nic"]
    while frontier:
        for near in graph[frontier.pop()]:
            alone = kinds[near] == "switch" and not any(kinds[other] == "device" for other in graph[near])
            if alone and near not in found:
                found.add(near)
                frontier.append(near)
    return found


def _prefix(names: Sequence[str]) -> str:
    """The common prefix of all names, up to its last punctuation character."""
    first, last = min(names), max(names)
    length = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(map(len, names)))
    return first[: max((at + 1 for at in range(length) if first[at] in "./:-_"), default=0)]


def _node(
    part: Sequence[str], prefix: str, graph: "networkx.Graph[str]", kinds: dict[str, str], order: dict[str, int]
) -> NodeView:
    def short(name: str) -> str:
        return name.removeprefix(prefix)

    def of_kind(kind: str, names: Iterable[str] = part) -> list[str]:
        return sorted((name for name in names if kinds[name] == kind), key=order.__getitem__)

    devices = of_kind("device")
    place = {name: number for number, name in enumerate(devices)}
    bridges = [(place[a], place[b]) for a in devices for b in of_kind("device", graph[a]) if place[a] < place[b]]
    switches = [(short(hub), tuple(place[near] for near in of_kind("device", graph[hub]))) for hub in of_kind("switch")]
    hosts = of_kind("host")
    branches, seen = [], 0
    for hub in of_kind("pcie"):
        up = of_kind("host", graph[hub])
        at = tuple(place[near] for near in of_kind("device", graph[hub]))
        nics = tuple(short(near) for near in of_kind("nic", graph[hub]))
        branches.append(Branch(short(hub), at, nics, short(up[0]) if up else None))
        seen += len(at) + len(nics) + bool(up)
    for device in devices:
        up = of_kind("host", graph[device])
        if up:
            branches.append(Branch(None, (place[device],), (), short(up[0])))
            seen += 1
    host_links = [(short(a), short(b)) for a in hosts for b in of_kind("host", graph[a]) if order[a] < order[b]]
    seen += len(bridges) + sum(len(at) for _, at in switches) + len(host_links)
    branches.sort(key=lambda branch: branch.devices)
    complete = seen == graph.subgraph(part).number_of_edges()
    return NodeView(
        prefix=prefix,
        numbers=tuple(order[name] for name in devices),
        devices=tuple(short(name) for name in devices),
        switches=tuple(switches),
        bridges=tuple(bridges),
        branches=tuple(branches),
        hosts=tuple(short(host) for host in hosts),
        host_links=tuple(host_links),
        drawn=complete and _is_plain(branches, bridges),
    )


def _is_plain(branches: Sequence[Branch], bridges: Sequence[tuple[int, int]]) -> bool:
    """Whether the devices of each branch are consecutive, and bridges join neighbours."""
    places = [place for branch in branches for place in branch.devices]
    ends = [end for bridge in bridges for end in bridge]
    return (
        places == sorted(set(places))
        and all(branch.devices for branch in branches)
        and len(ends) == len(set(ends))
        and all(b == a + 1 for a, b in bridges)
    )


def _rail(
    name: str,
    parts: Sequence[Sequence[str]],
    prefixes: Sequence[str],
    graph: "networkx.Graph[str]",
    kinds: dict[str, str],
    network: set[str],
) -> Rail:
    near = set(graph[name])
    nics = tuple(
        tuple(place.removeprefix(prefix) for place in part if place in near and kinds[place] == "nic")
        for part, prefix in zip(parts, prefixes, strict=True)
    )
    return Rail(name, nics, tuple(other for other in kinds if other in near and other in network))
