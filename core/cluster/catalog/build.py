"""Nodes of a catalogue expanded into a cluster: devices, hubs and links, at their effective rates. ::

                 NVSwitch                      one link per device, its port; with bridges, a link per pair of
                                               neighbours; with a mesh, one between any two
        gpu0   gpu1   gpu2   gpu3
          └ pcie0 ┘     └ pcie1 ┘   nic1       neighbours and their NIC share a PCIe switch
              │  └ nic0     │  └──── ┘
              └──── host0 ──┘                  sockets; two of them are joined by the processors' link
     nic0 ── rail0 ── nic0 of the next node    NICs with one index share a switch; the spine joins these

Rates are the catalogue's effective ones. A host is a socket with its memory (a NUMA node); what its devices stage or
offload crosses the links to it, and shares the rate of its memory.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from attrs import evolve, frozen

from ...errors import RequestError
from ...files.limits import MOST_DEVICES
from ..cluster import Cluster, Device, Hub
from ..device_type import DeviceType
from ..routing import Link
from ..sourced import Source
from .catalogue import Catalogue
from .parts import Group, LinkType, NodeType

SPINE = "spine"


@frozen
class Node:
    """One machine to build.

    Args:
        prefix: prefix of the names of its devices and hubs; empty if it is the only node.
        kind: its type, with the parameters of its group.
        gpus: how many of its devices are used: the first ones.
        nics: number of its NICs.
        device: the type of its devices.
        catalogue: where link types are looked up.
    """

    prefix: str
    kind: NodeType
    gpus: int
    nics: int
    device: DeviceType
    catalogue: Catalogue

    @property
    def switches(self) -> int:
        """PCIe switches with devices."""
        return -(-self.gpus // self.kind.gpus_per_pcie_switch)

    def socket_of(self, switch: int) -> int:
        """The socket of a PCIe switch."""
        per_socket = -(-self.kind.gpus // self.kind.sockets)
        return switch * self.kind.gpus_per_pcie_switch // per_socket

    def switch_of_nic(self, nic: int) -> int:
        """The PCIe switch of a NIC: they are spread evenly."""
        return nic * self.switches // self.nics

    def devices(self) -> Iterator[Device]:
        """The devices, with the memory that plans may use."""
        for gpu in range(self.gpus):
            yield Device(f"{self.prefix}gpu{gpu}", self.device.usable_bytes, self.device.name)

    def hubs(self, network: bool) -> Iterator[Hub]:
        """The switches and hosts of the machine; with its NICs if it is part of a network."""
        if self.kind.interconnect == "nvswitch":
            yield Hub(f"{self.prefix}nvswitch", "switch")
        for switch in range(self.switches):
            yield Hub(f"{self.prefix}pcie{switch}", "pcie")
        for socket in range(self.socket_of(self.switches - 1) + 1):
            memory = self.kind.host_memory_bytes, self.kind.host_memory_bytes_per_s
            yield Hub(f"{self.prefix}host{socket}", "host", *memory)
        for nic in range(self.nics if network else 0):
            yield Hub(f"{self.prefix}nic{nic}", "nic")

    def links(self) -> Iterator[Link]:
        """All links inside the machine."""
        yield from self._between_devices()
        pcie, p = self.catalogue.link(self.device.host_link), self.prefix
        for gpu in range(self.gpus):
            yield _link(pcie, f"{p}gpu{gpu}", f"{p}pcie{gpu // self.kind.gpus_per_pcie_switch}")
        for switch in range(self.switches):
            yield _link(pcie, f"{p}pcie{switch}", f"{p}host{self.socket_of(switch)}")
        sockets = self.socket_of(self.switches - 1) + 1
        between = self.catalogue.link(self.kind.socket_link)
        for b in range(sockets):
            yield from (_link(between, f"{p}host{a}", f"{p}host{b}") for a in range(b))

    def _between_devices(self) -> Iterator[Link]:
        p, kind = self.prefix, self.kind.interconnect
        if kind == "none":
            return
        if self.device.gpu_link is None:
            raise RequestError(
                f"node '{self.kind.name}' has interconnect {kind}, but device '{self.device.name}' has no gpu_link: "
                "give it one, or interconnect=none"
            )
        link = self.catalogue.link(self.device.gpu_link)
        if kind == "nvswitch":
            yield from (_link(link, f"{p}gpu{gpu}", f"{p}nvswitch") for gpu in range(self.gpus))
            return
        pairs = (
            combinations(range(self.gpus), 2) if kind == "mesh" else ((a, a + 1) for a in range(0, self.gpus - 1, 2))
        )
        yield from (_link(link, f"{p}gpu{a}", f"{p}gpu{b}") for a, b in pairs)

    def nic_links(self, switches: Sequence[str]) -> Iterator[Link]:
        """Links of the NICs: each to its PCIe switch and to its network switch."""
        pcie, nic = self.catalogue.link(self.device.host_link), self.catalogue.link(self.kind.nic)
        for number in range(self.nics):
            name = f"{self.prefix}nic{number}"
            yield _link(pcie, f"{self.prefix}pcie{self.switch_of_nic(number)}", name)
            yield _link(nic, name, switches[number % len(switches)])


def build(catalogue: Catalogue, groups: Sequence[Group]) -> Cluster:
    """The cluster of these groups of nodes, joined by one network where there are several nodes.

    Raises:
        RequestError: a group's node is unknown, has fewer devices than the group asks for, or has a wrong parameter.
    """
    count = sum(group.nodes for group in groups)
    devices_wanted = sum(group.nodes * group.gpus for group in groups)
    if devices_wanted > MOST_DEVICES:
        raise RequestError(
            f"the cluster has {devices_wanted} devices: at most {MOST_DEVICES} are supported; give fewer nodes"
        )
    nodes: list[Node] = []
    for group in groups:
        for _ in range(group.nodes):
            nodes.append(_node(catalogue, group, f"node{len(nodes)}." if count > 1 else ""))
    network = len(nodes) > 1
    hubs = [hub for node in nodes for hub in node.hubs(network)]
    links = [link for node in nodes for link in node.links()]
    if network:
        rails = max(node.nics for node in nodes) if all(node.kind.rails for node in nodes) else 1
        switches = [f"rail{rail}" for rail in range(rails)] if rails > 1 else ["network"]
        hubs += [Hub(name, "switch") for name in switches]
        links += [link for node in nodes for link in node.nic_links(switches)]
        if rails > 1:
            hubs.append(Hub(SPINE, "switch"))
            links += _spine(nodes, switches)
    devices = tuple(device for node in nodes for device in node.devices())
    return Cluster(devices, tuple(hubs), tuple(links))


def _spine(nodes: Sequence[Node], switches: Sequence[str]) -> Iterator[Link]:
    """Links from each rail's switch to the spine: the rate of all NICs on the rail, divided by the oversubscription."""
    over = max(node.kind.oversubscription for node in nodes)
    latency_s = max(node.kind.spine_latency_s for node in nodes)
    for rail, switch in enumerate(switches):
        rate = sum(node.catalogue.link(node.kind.nic).effective_bytes_per_s for node in nodes if node.nics > rail)
        yield Link(switch, SPINE, rate / over, latency_s)


def _node(catalogue: Catalogue, group: Group, prefix: str) -> Node:
    kind = catalogue.node(group.node)
    if kind.device is None:
        raise RequestError(f"node '{kind.name}' names no device: a cluster needs one that does")
    if group.gpus > kind.gpus:
        raise RequestError(
            f"{group.gpus}x{group.node} asks for {group.gpus} devices in a node, which has {kind.gpus}: write "
            f"{-(-group.gpus // kind.gpus)}x{kind.gpus}x{group.node} for several nodes"
        )
    nics = group.parameters.get("nics") or max(1, kind.nics * group.gpus // kind.gpus)
    if group.parameters:
        sources = dict.fromkeys(group.parameters, Source("a parameter of the cluster")) | dict(kind.sources)
        kind = evolve(kind, **group.parameters, sources=sources)
    return Node(prefix, kind, group.gpus, nics, catalogue.device(kind.device or ""), catalogue)


def _link(kind: LinkType, a: str, b: str) -> Link:
    back, both = kind.effective_back_bytes_per_s, kind.effective_both_bytes_per_s
    return Link(a, b, kind.effective_bytes_per_s, kind.latency_s, back, both)
