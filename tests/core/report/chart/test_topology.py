"""Clusters as SVG: well-formed, complete, and the same bytes for the same cluster."""

from xml.etree import ElementTree

import pytest
from panpipe.core.cluster.catalog import catalogue, find_cluster
from panpipe.core.cluster.topology import topology_of
from panpipe.core.report.chart.topology import topology_svg

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    "name", [*catalogue().clusters, "4xH100+4xA100-80GB", "64x8xH100", "8xMI300X", "2x4xV100-32GB", "cpu:4", "1xL40S"]
)
def test_every_device_of_a_drawn_node_is_there_once_and_inside_the_picture(name):
    cluster = find_cluster(name)
    svg = topology_svg(name, cluster)
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("width")) <= width
        assert float(rect.get("height")) <= height
    found = texts(svg)
    topology = topology_of(cluster)
    shown = [topology.nodes[group[0]] for group in topology.groups([device.type for device in cluster.devices])]
    for device in ("gpu0", "gpu3"):
        expected = sum(device in node.devices for node in shown if node.drawn)
        assert found.count(device) == expected
    assert topology_svg(name, cluster) == svg


def test_links_have_their_ends_and_rate_as_title():
    svg = topology_svg("pair", find_cluster("2x8xA100-80GB"))
    titles = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert "node0.gpu0 – node0.nvswitch: 240 GB/s in each direction, 6 µs" in titles
    assert "node0.pcie1 – node0.nic1: 24 GB/s in each direction, 3.5 µs" in titles
    assert "node1.nic3 – rail3: 23.5 GB/s in each direction, 4 µs" in titles
    assert "rail0 – spine: 47 GB/s in each direction, 0.5 µs" in titles


def test_names_are_escaped():
    assert "<b>" not in topology_svg("<b>", find_cluster("H100"))
