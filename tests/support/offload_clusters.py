"""Graphs and clusters for plans with offload."""

from panpipe.core.cluster.cluster import Cluster, Device, Hub
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode

RATE = 20e9
"""Bytes per second from a device to its host."""
SAVED = 64_000_000
"""Bytes that an operator saves of a microbatch."""


def uniform_graph(operators: int, k: float, parts: int = 1) -> OpGraph:
    """Equal layers of ``parts`` equal operators each; ``k`` is the round trip of saved tensors ÷ the compute."""
    work = 2 * SAVED / RATE / k
    count = operators * parts
    nodes = tuple(
        OpNode(
            f"layer.{i}", work / 3 / parts, work / 3 / parts, work / 3 / parts, parameter_bytes=1 << 20,
            state_bytes=4 << 20, saved_bytes=SAVED // parts, workspace_bytes=1 << 20,
        )
        for i in range(count)
    )  # fmt: skip
    edges = tuple(OpEdge(f"layer.{i}", f"layer.{i + 1}", 1 << 20) for i in range(count - 1))
    return OpGraph(nodes, edges, name="uniform")


def cluster_with_hosts(
    devices: int, *, rate: float = RATE, per_switch: int = 1, host_bytes: int | None = None
) -> Cluster:
    """Devices on one NVSwitch, and groups of ``per_switch`` of them on a PCIe switch with one link to their host."""
    names = [f"gpu{i}" for i in range(devices)]
    hosts = [f"host{i}" for i in range(devices // per_switch)]
    links = [Link(name, "nvswitch", 300e9, 1e-6) for name in names]
    hubs = [Hub("nvswitch"), *(Hub(host, "host", host_bytes) for host in hosts)]
    if per_switch == 1:
        links += [Link(name, host, rate, 1e-6) for name, host in zip(names, hosts, strict=True)]
    else:
        hubs += [Hub(f"pcie{i}", "pcie") for i in range(len(hosts))]
        links += [Link(name, f"pcie{i // per_switch}", rate, 1e-6) for i, name in enumerate(names)]
        links += [Link(f"pcie{i}", host, rate, 1e-6) for i, host in enumerate(hosts)]
    return Cluster(tuple(Device(name, 80 << 30) for name in names), tuple(hubs), tuple(links))
