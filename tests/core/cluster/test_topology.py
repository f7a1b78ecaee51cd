"""Clusters taken apart for people: nodes, branches, rails, and paths that are alike."""

from panpipe.core.cluster.catalog import find_cluster
from panpipe.core.cluster.cluster import Cluster, Device, Hub
from panpipe.core.cluster.routing import Link
from panpipe.core.cluster.topology import Branch, LinkClass, Rail, path_classes, topology_of


def test_topology_of_one_node_has_its_switches_and_devices():
    topology = topology_of(find_cluster("4xA100-40GB"))
    (node,) = topology.nodes
    assert node.drawn
    assert node.devices == ("gpu0", "gpu1", "gpu2", "gpu3")
    assert node.switches == (("nvswitch", (0, 1, 2, 3)),)
    assert node.branches == (Branch("pcie0", (0, 1), (), "host0"), Branch("pcie1", (2, 3), (), "host0"))
    assert (node.hosts, node.host_links, topology.rails) == (("host0",), (), ())
    assert topology.links == (
        LinkClass("device – switch", 4, 240e9, 6e-6),
        LinkClass("device – pcie", 4, 24e9, 3.5e-6),
        LinkClass("pcie – host", 2, 24e9, 3.5e-6),
    )


def test_bridges_of_a_node_are_pairs_of_devices():
    (node,) = topology_of(find_cluster("8xRTX3090")).nodes
    assert node.bridges == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert node.host_links == (("host0", "host1"),)


def test_equal_nodes_are_found_without_the_network():
    cluster = find_cluster("3x2xH100+2xA100-80GB")
    topology = topology_of(cluster)
    assert topology.names == ("node0", "node1", "node2", "node3")
    assert topology.groups([device.type for device in cluster.devices]) == [[0, 1, 2], [3]]
    assert topology.nodes[0].branches[1] == Branch("pcie1", (1,), ("nic1",), "host0")
    assert topology.rails == (
        Rail("rail0", (("nic0",), ("nic0",), ("nic0",), ("nic0",)), ("spine",)),
        Rail("rail1", (("nic1",), ("nic1",), ("nic1",), ()), ("spine",)),
        Rail("spine", ((), (), (), ()), ("rail0", "rail1")),
    )


def test_nodes_with_different_devices_are_not_equal():
    cluster = find_cluster("2xA100-40GB+2xA100-80GB")
    assert topology_of(cluster).groups([device.type for device in cluster.devices]) == [[0], [1]]


def test_topology_that_is_no_tree_is_not_drawn():
    (node,) = topology_of(find_cluster("cpu:4")).nodes
    assert not node.drawn
    nested = Cluster(
        (Device("g", 1),),
        (Hub("inner", "pcie"), Hub("outer", "pcie"), Hub("host", "host")),
        (Link("g", "inner", 1.0, 0.0), Link("inner", "outer", 1.0, 0.0), Link("outer", "host", 1.0, 0.0)),
    )
    assert not topology_of(nested).nodes[0].drawn


def test_nodes_without_a_common_name_are_numbered():
    cluster = Cluster((Device("left", 1), Device("right", 1)))
    assert topology_of(cluster).names == ("node 0", "node 1")


def test_device_at_the_host_has_a_separate_branch():
    cluster = Cluster((Device("g", 1),), (Hub("host", "host"),), (Link("g", "host", 1.0, 0.0),))
    assert topology_of(cluster).nodes[0].branches == (Branch(None, (0,), (), "host"),)


def test_equal_paths_are_listed_once():
    found = [(path.device, path.count, path.hubs) for path in path_classes(find_cluster("8xRTX3090"))]
    assert found == [
        (1, 1, ()),
        (2, 2, ("pcie0", "host0", "pcie2")),
        (4, 4, ("pcie0", "host0", "host1", "pcie4")),
        (None, 1, ("pcie0", "host0")),
    ]
