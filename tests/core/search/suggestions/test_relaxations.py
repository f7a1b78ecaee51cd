"""Clusters and graphs that could be asked for in place of what does not fit."""

import pytest
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.search.suggestions.relaxations import with_more_devices, with_more_memory, with_smaller_microbatches

GRAPH = OpGraph(
    tuple(OpNode(f"n{i}", 1.0, 1.0, 1.0, state_bytes=10, saved_bytes=5, workspace_bytes=3) for i in range(40)),
    tuple(OpEdge(f"n{i}", f"n{i + 1}", 9) for i in range(39)),
)


def test_added_devices_are_linked_like_the_last_one():
    direct = with_more_devices(fully_connected(2, 10, 5.0, 0.5), 4)
    assert [device.name for device in direct.devices] == ["device0", "device1", "device2", "device3"]
    assert {(a, b): direct.transfer_s(a, b, 10) for a in range(4) for b in range(4) if a != b} == dict.fromkeys(
        ((a, b) for a in range(4) for b in range(4) if a != b), 2.5
    )
    links = (Link("a", "hub", 5.0, 0.25), Link("device2", "hub", 5.0, 0.25))
    switched = with_more_devices(Cluster((Device("a", 10), Device("device2", 20, None)), (Hub("hub"),), links), 3)
    assert switched.devices[2] == Device("device2+", 20)
    assert switched.transfer_s(0, 2, 10) == pytest.approx(2.5)


def test_graph_of_smaller_microbatches_costs_less_and_holds_the_same_state():
    half = with_smaller_microbatches(GRAPH, 2)
    assert half.nodes[0] == OpNode("n0", 0.5, 0.5, 0.5, state_bytes=10, saved_bytes=3, workspace_bytes=2)
    assert half.edges[0].bytes == 5


def test_more_memory_is_added_to_each_device_in_whole_bytes():
    cluster = Cluster((Device("a", 10), Device("b", 20)), (), (Link("a", "b", 5.0, 0.0),))
    found = with_more_memory(cluster, 2.5)
    assert [device.memory_bytes for device in found.devices] == [13, 23]
    assert (found.links, [device.name for device in found.devices]) == (cluster.links, ["a", "b"])
