"""The catalogue's entries other than devices: links, nodes and clusters."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from ...errors import RequestError
from ...files.limits import check_count
from ..sourced import Source, check_numbers

INTERCONNECTS = ("nvswitch", "mesh", "bridges", "none")
PARAMETERS: Mapping[str, type] = {
    "nics": int,
    "nic": str,
    "gpus_per_pcie_switch": int,
    "sockets": int,
    "socket_link": str,
    "interconnect": str,
    "rails": bool,
    "oversubscription": float,
    "host_memory_bytes": int,
    "host_memory_bytes_per_s": float,
}
"""The fields of a node that a cluster may override, with their types."""
MOST: Mapping[str, int] = {"gpus": 4096, "gpus_per_pcie_switch": 4096, "sockets": 64, "nics": 4096}
"""Limits of a node's counts."""
_VALUES = {
    int: ((int,), "a whole number"), float: ((int, float), "a number"), str: ((str,), "a name"),
    bool: ((bool,), "true or false"),
}  # fmt: skip


@frozen
class LinkType:
    """A type of link. Rates are for each direction.

    Args:
        name: its name in the catalogue.
        title: a name for display.
        peak_bytes_per_s: the rate in the link's specification.
        effective_bytes_per_s: the rate that large transfers reach; for a host link the direction from device to host.
        latency_s: latency of this link alone; a path consists of several links.
        effective_back_bytes_per_s: the rate in the other direction, if it differs.
        effective_both_bytes_per_s: the rate of both directions together, if they share it while both are busy.
        sources: the source of each number, by the number's name.

    Raises:
        RequestError: a number is out of its range.
    """

    name: str
    title: str
    peak_bytes_per_s: float
    effective_bytes_per_s: float
    latency_s: float
    sources: Mapping[str, Source] = field(hash=False)
    effective_back_bytes_per_s: float | None = None
    effective_both_bytes_per_s: float | None = None

    def __attrs_post_init__(self) -> None:
        names = ("peak_bytes_per_s", "effective_bytes_per_s", "effective_back_bytes_per_s",
                 "effective_both_bytes_per_s", "latency_s")  # fmt: skip
        numbers = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        check_numbers(self, "link", numbers.items(), zero=("latency_s",))
        for name, value in numbers.items():
            peak = self.peak_bytes_per_s * (2 if name == "effective_both_bytes_per_s" else 1)
            if name.startswith("effective") and value > peak:
                raise RequestError(f"{name} of link '{self.name}' is {value:g}, above its peak of {peak:g}")


@frozen
class NodeType:
    """How the devices of one machine are connected.

    Args:
        name: its name in the catalogue, usually that of its device type.
        title: a name for display.
        device: the type of its devices; None in the node for all device types without a node entry.
        interconnect: ``nvswitch`` (a port of each device into one non-blocking switch), ``mesh`` (a link between any
            two devices), ``bridges`` (pairs of devices) or ``none`` (through the host alone).
        gpus: the number of devices of a full node.
        gpus_per_pcie_switch: devices that share a PCIe switch; 1 means that each has its own root port.
        sockets: hosts that the devices are distributed over.
        socket_link: link between two sockets.
        nics: NICs of a full node, distributed over the PCIe switches.
        nic: link from each of them to the network.
        rails: if true, the NICs with one index of all nodes share a switch, and a spine joins these switches; otherwise
            all NICs share one switch.
        oversubscription: the rate of a rail's NICs divided by the rate of its link to the spine.
        spine_latency_s: latency of the link between a rail's switch and the spine.
        host_memory_bytes: memory of each socket for offloaded tensors; None for no limit.
        host_memory_bytes_per_s: rate of each socket's memory, for reads and writes together; None for no limit.
        sources: the source of each number, by the number's name.

    Raises:
        RequestError: a number is out of its range, or the interconnect unknown.
    """

    name: str
    title: str
    interconnect: str
    gpus: int
    gpus_per_pcie_switch: int
    sockets: int
    socket_link: str
    nics: int
    nic: str
    rails: bool
    oversubscription: float
    spine_latency_s: float
    sources: Mapping[str, Source] = field(hash=False)
    device: str | None = None
    host_memory_bytes: int | None = None
    host_memory_bytes_per_s: float | None = None

    def __attrs_post_init__(self) -> None:
        names = ("gpus", "gpus_per_pcie_switch", "sockets", "nics", "oversubscription", "host_memory_bytes",
                 "host_memory_bytes_per_s", "spine_latency_s")  # fmt: skip
        numbers = ((name, getattr(self, name)) for name in names if getattr(self, name) is not None)
        check_numbers(self, "node", numbers, zero=("spine_latency_s",))
        for name, most in MOST.items():
            check_count(f"{name} of node '{self.name}'", getattr(self, name), most, least=1)
        if self.interconnect not in INTERCONNECTS:
            raise RequestError(
                f"interconnect of node '{self.name}' is '{self.interconnect}': give one of {', '.join(INTERCONNECTS)}"
            )


@frozen
class Group:
    """Equal nodes of a cluster.

    Args:
        node: their type.
        gpus: devices of each.
        nodes: how many.
        parameters: fields of the node's type that are overridden here.
    """

    node: str
    gpus: int
    nodes: int = 1
    parameters: Mapping[str, Any] = field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        for name, count in (("nodes", self.nodes), ("gpus", self.gpus)):
            if count < 1:
                raise RequestError(f"{name} of {self.nodes}x{self.gpus}x{self.node} is {count}: it must be at least 1")
        for name, value in self.parameters.items():
            if name not in PARAMETERS:
                known = ", ".join(PARAMETERS)
                raise RequestError(f"'{name}' of nodes of '{self.node}' is no parameter: give one of {known}")
            known_types, words = _VALUES[PARAMETERS[name]]
            if type(value) not in known_types:
                raise RequestError(f"{name} of nodes of '{self.node}' is {value!r}: give {words}")


@frozen
class NamedCluster:
    """A cluster of the catalogue: groups of nodes on one network."""

    name: str
    title: str
    groups: tuple[Group, ...]
