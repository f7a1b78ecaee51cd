"""A cluster as a text drawing, character by character."""

import pytest
from panpipe.answers.topology import Canvas, draw, draw_network, draw_node, list_links, rate_text
from panpipe.core.cluster.catalog.find import find_cluster
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.topology import Branch, NodeView, Rail, Topology, topology_of


def test_canvas_grows_and_writes_over_what_is_there():
    canvas = Canvas()
    canvas.put(1, 2, "ab")
    canvas.put(1, 3, "cd")
    assert canvas.lines() == ["", "  acd"]
    canvas.centred(0, 1, "xyz")
    canvas.centred(2, 0, "long")  # not left of the first column
    assert canvas.lines() == ["xyz", "  acd", "long"]


def test_bar_joins_columns_and_has_its_label_in_the_middle():
    canvas = Canvas()
    assert canvas.bar(0, [0, 6, 12], "sw", "┌┬┐") == 6
    assert canvas.bar(1, [3], "one", "┌┬┐") == 3
    assert canvas.bar(2, [0, 4], "wide", "└┴┘") == 2
    assert canvas.lines() == ["┌─── sw ────┐", "  one", "wide┘"]


NODE = NodeView(
    "", (0, 1, 2, 3), ("gpu0", "gpu1", "gpu2", "gpu3"), (("nvswitch", (0, 1, 2, 3)),), (),
    (Branch("pcie0", (0, 1), ("nic0",), "host0"), Branch("pcie1", (2, 3), (), "host1")), ("host0", "host1"),
    (("host0", "host1"),), True,
)  # fmt: skip


def test_node_has_a_column_for_each_device():
    lines = draw_node(NODE)
    switch, devices, pcie, nics, hosts, between = lines
    columns = [devices.index(f"gpu{i}") + 2 for i in range(4)]
    assert switch.strip().startswith("┌")
    assert switch.strip().endswith("┐")
    assert "nvswitch" in switch
    assert [switch.index("┌"), switch.rindex("┐")] == [columns[0], columns[3]]
    assert [pcie.index("└"), pcie.index("┘")] == columns[:2]
    assert "pcie0" in pcie
    assert "pcie1" in pcie
    assert "├nic0" in nics
    assert "│" in nics  # the other branch goes on to its host
    assert hosts.split() == ["host0", "host1"]
    assert between.strip()[0] == "└"
    assert between.strip()[-1] == "┘"


def test_bridged_pairs_have_an_arc():
    pairs = NodeView("", (0, 1), ("a", "b"), (), ((0, 1),), (Branch(None, (0,), (), None),), (), (), True)
    arc, devices = draw_node(pairs)[:2]
    assert [arc.strip()[0], arc.strip()[-1]] == ["╭", "╮"]
    assert devices.split() == ["a", "b"]


def test_links_of_a_node_without_a_drawing():
    def listed(cluster):
        return list_links(cluster, topology_of(cluster).nodes[0])

    assert listed(fully_connected(3, 1000, 2e9, 1e-6)) == ["3 devices, a separate link between every two"]
    (line,) = listed(fully_connected(2, 1000, 2e9, 1e-6))
    assert line.split("  ")[-2:] == ["2 GB/s", "1 µs"]
    assert listed(fully_connected(1, 1000, 2e9, 1e-6)) == ["no links"]


RAILS = [Rail(f"rail{i}", (("nic0",), ("nic1",), ("nic2",)), ("spine",)) for i in range(3)]


def network(count=3, rails=None):
    names = tuple(f"node{i}" for i in range(count))
    return Topology(names, (NODE,) * count, tuple(RAILS if rails is None else rails), ())


def test_network_has_a_line_for_each_switch_and_a_brace_to_the_spine():
    head, *lines = draw_network(network(), 100)
    assert head.split() == ["node0", "node1", "node2"]
    assert [line.split()[0] for line in lines] == ["rail0", "rail1", "rail2"]
    assert lines[0].endswith("─┐")
    assert lines[1].endswith("─┼── spine")
    assert lines[2].endswith("─┘")
    assert all("nic2" in line for line in lines)


def test_one_switch_names_what_it_is_linked_to():
    (line,) = draw_network(network(rails=RAILS[:1]), 100)[1:]
    assert line.endswith("── spine")
    (line,) = draw_network(network(rails=[Rail("network", (("nic0",), ("nic1",), ()), ())]), 100)[1:]
    assert line.rstrip().endswith("nic1")


def test_narrow_network_has_the_first_nodes_and_the_last():
    head = draw_network(network(), 30)[0]
    assert head.split() in (["node0", "node1", "node2"], ["node0", "…", "node2"])


@pytest.mark.parametrize(("rate", "text"), [(23.5e9, "23.5 GB/s"), (1e9, "1 GB/s"), (12345e9, "1.234e+04 GB/s")])
def test_rate_of_a_link_has_a_unit(rate, text):
    assert rate_text(rate) == text


def test_equal_nodes_are_drawn_once_and_wide_ones_are_listed():
    cluster = find_cluster("2x2xH100")
    view = topology_of(cluster)
    lines = draw(cluster, view, 100)
    assert lines[0] == "node0 … node1, 2 alike: 2 × H100"
    assert "network" in lines
    assert any("gpu0" in line and "gpu1" in line for line in lines)
    narrow = draw(cluster, view, 10)
    assert any("GB/s" in line for line in narrow)
    assert not any("GB/s" in line for line in lines)
