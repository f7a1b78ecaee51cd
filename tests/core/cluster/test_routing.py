"""Paths on a router alone: latency first, then few links, then spread by destination; and what a path is worth."""

import pytest
from panpipe.core.cluster.routing import ArrangedRouter, Link, Router, path_latency_s, path_rate, reverse


def router(kinds, *links, forwarding=()):
    """Places with these kinds, None for a device, and links between their names with a latency."""
    return Router(
        list(kinds), list(kinds.values()), [Link(a, b, 10.0, latency) for a, b, latency in links], forwarding
    )  # fmt: skip


def names(path, start):
    found = [start]
    for link, from_a in path:
        assert found[-1] == (link.a if from_a else link.b)
        found.append(link.b if from_a else link.a)
    return found


DEVICES = {"a": None, "b": None, "c": None}
HUB = {"a": None, "b": "switch", "c": None}


def test_least_latency_wins_and_then_the_fewest_links():
    assert names(router(HUB, ("a", "c", 3.0), ("a", "b", 1.0), ("c", "b", 1.0)).path(0, 2), "a") == ["a", "b", "c"]
    assert names(router(HUB, ("a", "c", 2.0), ("a", "b", 1.0), ("c", "b", 1.0)).path(0, 2), "a") == ["a", "c"]


@pytest.mark.parametrize("unit", [1e-6, 0.1, 1.0, 30.0, 3e10, 1e290])
def test_paths_of_any_latencies_end_and_equal_ones_have_the_fewest_links(unit):
    links = ("a", "c", 3 * unit), ("a", "b", unit), ("c", "b", 2 * unit), ("b", "d", 0.0), ("c", "d", 0.0)
    found = router({**HUB, "d": "switch"}, *links)
    assert names(found.path(0, 1), "a") == ["a", "b"]
    assert names(found.path(0, 2), "a") == ["a", "b", "d", "c"]
    assert names(router(HUB, *links[:3]).path(0, 2), "a") == ["a", "c"]


def test_paths_cross_no_device_but_those_that_forward():
    line = ("a", "b", 1.0), ("b", "c", 1.0)
    assert router(DEVICES, *line).path(0, 2) is None
    assert names(router(DEVICES, *line, forwarding={1}).path(0, 2), "a") == ["a", "b", "c"]
    longer = ("a", "host", 5.0), ("host", "c", 5.0)
    assert names(router({**DEVICES, "host": "host"}, *line, *longer).path(0, 2), "a") == ["a", "host", "c"]
    assert router(DEVICES, *line).path(0, 1) == router(DEVICES, *line, forwarding={0, 1, 2}).path(0, 1)


def test_place_itself_takes_no_link_and_what_nothing_connects_has_no_path():
    found = router(DEVICES, ("a", "b", 1.0))
    assert found.path(0, 0) == ()
    assert found.path(0, 2) is None
    assert found.nearest(0, "host") is None


@pytest.mark.parametrize(
    ("kind", "connected"), [("pcie", False), ("nic", False), ("host", True), ("switch", True)]
)  # fmt: skip
def test_paths_turn_around_at_hosts_and_switches_alone(kind, connected):
    found = router({"a": None, "b": None, "hub": kind}, ("a", "hub", 1.0), ("b", "hub", 1.0))
    assert (found.path(0, 1) is not None) == connected


def test_nearest_hub_of_a_kind_is_by_latency():
    kinds = {"a": None, "pcie": "pcie", "far": "host", "near": "host"}
    found = router(kinds, ("a", "pcie", 1.0), ("pcie", "far", 5.0), ("pcie", "near", 2.0))
    assert names(found.nearest(0, "host"), "a") == ["a", "pcie", "near"]


def test_equal_paths_are_spread_by_the_number_of_the_destination():
    kinds = {"a": None, "b": None, "c": None, "left": "switch", "right": "switch"}
    links = [(device, hub, 1.0) for device in "abc" for hub in ("left", "right")]
    found = router(kinds, *links)
    assert {names(found.path(0, dst), "a")[1] for dst in (1, 2)} == {"left", "right"}


def test_devices_in_another_order_have_the_same_paths_under_other_numbers():
    found = router(DEVICES, ("a", "b", 1.0), ("b", "c", 1.0))
    arranged = ArrangedRouter(found, (2, 0, 1))
    assert arranged.path(0, 1) == found.path(2, 0)
    assert arranged.nearest(0, "host") is None


def test_rate_of_a_path_is_that_of_its_slowest_link_in_its_direction():
    fast, uneven, shared = (
        Link("a", "b", 10.0, 0.5), Link("b", "c", 8.0, 0.25, back_bytes_per_s=2.0),
        Link("c", "d", 9.0, 0.0, both_bytes_per_s=7.0),
    )  # fmt: skip
    path = ((fast, True), (uneven, True), (shared, True))
    assert (path_rate(path), path_latency_s(path)) == (7.0, 0.75)
    back = reverse(path)
    assert [link.a for link, _ in back] == ["c", "b", "a"]
    assert (path_rate(back), path_latency_s(back)) == (2.0, 0.75)
    assert reverse(back) == path
    assert (path_rate(()), path_latency_s(())) == (float("inf"), 0)
