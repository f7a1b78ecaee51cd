"""Cuts of a graph, and what crosses them."""

import pytest
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.partition import boundary_bytes, device_limits, stages_of
from panpipe.core.errors import RequestError

NODES = tuple(OpNode(name) for name in "abcd")


def test_stages_of_cuts_have_the_nodes_between_them():
    assert stages_of(OpGraph(NODES), (0, 1, 4)) == (("a",), ("b", "c", "d"))


def test_tensor_crosses_every_position_up_to_its_last_reader_once():
    edges = (OpEdge("a", "b", 10), OpEdge("a", "d", 4), OpEdge("b", "c", 1), OpEdge("c", "d", 2))
    # a's tensor has 10 bytes, its largest reading, and crosses after a, b and c.
    assert boundary_bytes(OpGraph(NODES, edges)) == (10, 11, 12, 0)


def test_two_tensors_of_one_node_cross_separately():
    edges = (OpEdge("a", "b", 10), OpEdge("a", "c", 3, tensor=1))
    assert boundary_bytes(OpGraph(NODES, edges)) == (13, 3, 0, 0)


def test_device_limit_is_at_most_the_device_s_memory():
    cluster = fully_connected(2, 100, 1.0, 0.0)
    assert device_limits(cluster) == (100, 100)
    assert device_limits(cluster, 40) == (40, 40)
    assert device_limits(cluster, 400) == (100, 100)
    with pytest.raises(RequestError, match="must be above 0"):
        device_limits(cluster, 0)
