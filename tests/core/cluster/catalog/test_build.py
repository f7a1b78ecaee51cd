"""Nodes of a catalogue as clusters, from a catalogue of three entries: names, links and rates by hand."""

import pytest
from attrs import evolve
from panpipe.core.cluster.catalog.build import build
from panpipe.core.cluster.catalog.catalogue import Catalogue
from panpipe.core.cluster.catalog.parts import Group, LinkType, NodeType
from panpipe.core.cluster.catalog.registry import catalogue
from panpipe.core.cluster.sourced import Source
from panpipe.core.errors import RequestError

ASSUMED = Source("for tests")


def link_type(name, rate, latency_s=0.0, **rates):
    numbers = ("peak_bytes_per_s", "effective_bytes_per_s", "latency_s", *rates)
    return LinkType(name, name, 1000.0, rate, latency_s, dict.fromkeys(numbers, ASSUMED), **rates)


LINKS = (
    link_type("pcie", 10.0, 1e-6, effective_back_bytes_per_s=8.0, effective_both_bytes_per_s=12.0),
    link_type("nvlink", 100.0, 2e-6),
    link_type("between", 5.0),
    link_type("ethernet", 3.0, 4e-6),
)
DEVICE = evolve(
    catalogue().device("H100"), name="chip", aliases=(), host_link="pcie", host_copy=None, gpu_link="nvlink"
)
NODE = NodeType(
    "box", "A box", "nvswitch", 4, 2, 2, "between", 2, "ethernet", True, 2.0, 7e-6,
    dict.fromkeys(
        ("gpus", "gpus_per_pcie_switch", "sockets", "nics", "oversubscription", "spine_latency_s"), ASSUMED
    ), device="chip",
)  # fmt: skip


def built(*groups, **changes):
    node = evolve(NODE, **changes)
    links = {link.name: link for link in LINKS}
    return build(Catalogue({"chip": DEVICE}, links, {"box": node}, {}), groups)


def ends(cluster):
    return {(link.a, link.b): link.bytes_per_s for link in cluster.links}


def test_one_node_has_no_network():
    cluster = built(Group("box", 4))
    assert [device.name for device in cluster.devices] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert {device.memory_bytes for device in cluster.devices} == {DEVICE.usable_bytes}
    assert [(hub.name, hub.kind) for hub in cluster.hubs] == [
        ("nvswitch", "switch"), ("pcie0", "pcie"), ("pcie1", "pcie"), ("host0", "host"), ("host1", "host"),
    ]  # fmt: skip
    assert ends(cluster) == {
        **{(f"gpu{i}", "nvswitch"): 100.0 for i in range(4)},
        ("gpu0", "pcie0"): 10.0, ("gpu1", "pcie0"): 10.0, ("gpu2", "pcie1"): 10.0, ("gpu3", "pcie1"): 10.0,
        ("pcie0", "host0"): 10.0, ("pcie1", "host1"): 10.0, ("host0", "host1"): 5.0,
    }  # fmt: skip


def test_link_has_the_rates_of_its_type_in_both_directions():
    link = next(link for link in built(Group("box", 1)).links if link.b == "pcie0")
    assert (link.bytes_per_s, link.latency_s, link.back_bytes_per_s, link.both_bytes_per_s) == (10.0, 1e-6, 8.0, 12.0)


def test_bridges_join_pairs_and_none_joins_nothing():
    pairs = ends(built(Group("box", 3), interconnect="bridges"))
    assert [pair for pair in pairs if pair[1].startswith("gpu")] == [("gpu0", "gpu1")]  # the third one has no partner
    assert not [pair for pair in ends(built(Group("box", 4), interconnect="none")) if pair[1].startswith("gpu")]


def test_nodes_are_joined_by_rails_and_a_spine():
    cluster = built(Group("box", 4, nodes=2))
    assert [hub.name for hub in cluster.hubs if hub.kind == "switch"] == [
        "node0.nvswitch", "node1.nvswitch", "rail0", "rail1", "spine",
    ]  # fmt: skip
    found = ends(cluster)
    for node in range(2):
        assert found[f"node{node}.pcie0", f"node{node}.nic0"] == 10.0
        assert found[f"node{node}.pcie1", f"node{node}.nic1"] == 10.0
        assert found[f"node{node}.nic1", "rail1"] == 3.0
    spine = [link for link in cluster.links if link.b == "spine"]
    # the NICs of two nodes, divided by the oversubscription
    assert [(link.a, link.bytes_per_s, link.latency_s) for link in spine] == [
        ("rail0", 3.0, 7e-6), ("rail1", 3.0, 7e-6),
    ]  # fmt: skip


def test_rail_of_fewer_nodes_has_fewer_nics():
    cluster = built(Group("box", 4), Group("box", 2))
    spine = {link.a: link.bytes_per_s for link in cluster.links if link.b == "spine"}
    assert spine == {"rail0": 3.0, "rail1": 1.5}  # half of the second node has one NIC


def test_nodes_without_rails_share_one_switch():
    cluster = built(Group("box", 4, nodes=2), rails=False)
    assert [hub.name for hub in cluster.hubs if "." not in hub.name] == ["network"]
    assert ends(cluster)["node1.nic1", "network"] == 3.0


def test_parameters_of_a_group_override_its_node():
    cluster = built(Group("box", 2, nodes=2, parameters={"nics": 1, "gpus_per_pcie_switch": 1}))
    assert [hub.name for hub in cluster.hubs if hub.name.startswith("node0.pcie")] == ["node0.pcie0", "node0.pcie1"]
    assert [hub.name for hub in cluster.hubs if hub.kind == "nic"] == ["node0.nic0", "node1.nic0"]


@pytest.mark.parametrize(
    ("groups", "changes", "said"),
    [
        ([Group("box", 6)], {}, "6xbox asks for 6 devices in a node, which has 4: write 2x4xbox for several nodes"),
        ([Group("box", 4, nodes=16385)], {}, "the cluster has 65540 devices: at most 65536"),
        ([Group("box", 2)], {"device": None}, "node 'box' names no device"),
    ],
)
def test_wrong_groups_are_refused(groups, changes, said):
    with pytest.raises(RequestError, match=said):
        built(*groups, **changes)


def test_interconnect_without_a_link_is_refused():
    device = evolve(DEVICE, gpu_link=None)
    known = Catalogue({"chip": device}, {link.name: link for link in LINKS}, {"box": NODE}, {})
    with pytest.raises(RequestError, match="node 'box' has interconnect nvswitch, but device 'chip' has no gpu_link"):
        build(known, [Group("box", 2)])
