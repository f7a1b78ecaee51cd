"""Relaxed inputs for a request that no plan fits: more devices, smaller microbatches, more memory."""

from math import ceil

from attrs import evolve

from ...cluster.cluster import Cluster
from ...cluster.routing import Link
from ...costs.graph import OpEdge, OpGraph, OpNode


def with_more_devices(cluster: Cluster, count: int) -> Cluster:
    """The cluster with ``count`` devices: further ones have the properties and the links of the last one.

    If the last device is linked to other devices directly, new devices are also linked to it and to each other.
    """
    last = cluster.devices[-1]
    names = {end for link in cluster.links for end in (link.a, link.b)} | {device.name for device in cluster.devices}
    own = [link for link in cluster.links if last.name in (link.a, link.b)]
    known = {device.name for device in cluster.devices}
    direct = next((link for link in own if _other(link, last.name) in known), None)
    devices, links = list(cluster.devices), list(cluster.links)
    for number in range(len(devices), count):
        name = f"device{number}"
        while name in names:
            name += "+"
        names.add(name)
        new = [_between(link, last.name, _other(link, last.name), name) for link in own]
        if direct is not None:
            new += [_between(direct, last.name, device.name, name) for device in devices[len(cluster.devices) - 1 :]]
        links += new
        devices.append(evolve(last, name=name))
    return evolve(cluster, devices=tuple(devices), links=tuple(links))


def _between(like: Link, end: str, other: str, name: str) -> Link:
    """A link between two places like a link of ``end``, in whose place is ``name``."""
    if like.back_bytes_per_s is None or like.b == end:
        return evolve(like, a=other, b=name)
    return evolve(like, a=name, b=other)


def _other(link: Link, end: str) -> str:
    return link.b if link.a == end else link.a


def with_smaller_microbatches(graph: OpGraph, parts: int) -> OpGraph:
    """The graph for microbatches of one ``parts``-th of the size.

    Costs are in proportion to the size. Times are then too short for operators that do not fill the device.
    """

    def node(given: OpNode) -> OpNode:
        return evolve(
            given,
            forward_s=given.forward_s / parts,
            backward_input_s=given.backward_input_s / parts,
            backward_weight_s=given.backward_weight_s / parts,
            saved_bytes=ceil(given.saved_bytes / parts),
            workspace_bytes=ceil(given.workspace_bytes / parts),
        )

    def edge(given: OpEdge) -> OpEdge:
        return evolve(given, bytes=ceil(given.bytes / parts))

    return evolve(graph, nodes=tuple(map(node, graph.nodes)), edges=tuple(map(edge, graph.edges)))


def with_more_memory(cluster: Cluster, extra_bytes: float) -> Cluster:
    """The cluster with ``extra_bytes`` more memory on each device."""
    devices = (evolve(device, memory_bytes=device.memory_bytes + ceil(extra_bytes)) for device in cluster.devices)
    return evolve(cluster, devices=tuple(devices))
