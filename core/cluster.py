"""A cluster: devices, the hubs between them and the links that they share. Documents of ``panpipe.cluster/1``."""

import itertools
from functools import cached_property
from pathlib import Path

import networkx
from attrs import frozen

from .documents import from_json, read_text, to_json
from .errors import RequestError

FORMAT = "panpipe.cluster/1"


@frozen
class Device:
    """A device that computes.

    Args:
        name: unique among devices and hubs.
        memory_bytes: all there is for panpipe; nothing is kept back from it.
        type: a name from the catalogue, or None where the operator graph already carries times.
    """

    name: str
    memory_bytes: int
    type: str | None = None


@frozen
class Link:
    """A link between two devices or hubs. ``bytes_per_s`` is for each direction; ``latency_s`` in seconds."""

    a: str
    b: str
    bytes_per_s: float
    latency_s: float


@frozen(slots=False)
class Cluster:
    """Devices, in the order that plans number them, with hubs and links.

    Raises:
        RequestError: a name stands twice, a link names nothing known, or a rate, latency or memory is not positive.
    """

    devices: tuple[Device, ...]
    hubs: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()

    def __attrs_post_init__(self) -> None:
        names = [device.name for device in self.devices] + list(self.hubs)
        if not self.devices:
            raise RequestError("the cluster has no devices: give it at least one")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise RequestError(f"'{twice}' stands twice in the cluster: names are unique; rename one")
        for device in self.devices:
            if device.memory_bytes <= 0:
                raise RequestError(f"memory_bytes of '{device.name}' is {device.memory_bytes}: it must be above 0")
        for link in self.links:
            unknown = next((end for end in (link.a, link.b) if end not in names), None)
            if unknown is not None:
                raise RequestError(f"link {link.a} – {link.b} names '{unknown}', which is neither device nor hub")
            if link.bytes_per_s <= 0 or link.latency_s < 0:
                raise RequestError(
                    f"link {link.a} – {link.b} has {link.bytes_per_s} bytes/s and {link.latency_s} s: "
                    "a rate is above 0 and a latency at least 0"
                )

    @cached_property
    def network(self) -> "networkx.Graph[str]":
        """The links as a graph; each edge carries its ``link``."""
        graph: networkx.Graph[str] = networkx.Graph()
        graph.add_nodes_from([device.name for device in self.devices] + list(self.hubs))
        for link in self.links:
            graph.add_edge(link.a, link.b, link=link)
        return graph

    @cached_property
    def _paths(self) -> dict[tuple[int, int], tuple[tuple[Link, bool], ...]]:
        return {}

    def path(self, src: int, dst: int) -> tuple[tuple[Link, bool], ...]:
        """Links from device ``src`` to device ``dst``, each with whether it is crossed from a to b.

        The path of least latency; among equals, the one of fewest links.

        Raises:
            RequestError: nothing connects them.
        """
        if (src, dst) not in self._paths:
            ends = self.devices[src].name, self.devices[dst].name
            try:
                names = networkx.shortest_path(
                    self.network, *ends, weight=lambda a, b, data: data["link"].latency_s + 1e-12
                )
            except networkx.NetworkXNoPath:
                raise RequestError(
                    f"no link connects device {src} ('{ends[0]}') to {dst} ('{ends[1]}'): add one"
                ) from None
            hops = []
            for a, b in itertools.pairwise(names):
                link: Link = self.network.edges[a, b]["link"]
                hops.append((link, link.a == a))
            self._paths[src, dst] = tuple(hops)
        return self._paths[src, dst]

    def transfer_s(self, src: int, dst: int, size_bytes: float) -> float:
        """Time of one transfer with all links free: the sum of latencies, then the rate of the slowest link."""
        if src == dst:
            return 0.0
        path = self.path(src, dst)
        return sum(link.latency_s for link, _ in path) + size_bytes / min(link.bytes_per_s for link, _ in path)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. Raises RequestError where it is not one."""
    return from_json(read_text(path), FORMAT, Cluster, str(path))


def cluster_json(cluster: Cluster) -> str:
    """The cluster document of a cluster."""
    return to_json(FORMAT, cluster)


def fully_connected(count: int, memory_bytes: int, bytes_per_s: float, latency_s: float) -> Cluster:
    """``count`` equal devices with a link of their own between every two."""
    names = [f"device{i}" for i in range(count)]
    links = [Link(a, b, bytes_per_s, latency_s) for i, a in enumerate(names) for b in names[i + 1 :]]
    return Cluster(tuple(Device(name, memory_bytes) for name in names), (), tuple(links))
