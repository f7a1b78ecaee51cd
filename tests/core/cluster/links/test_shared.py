"""Trees of shared links are found again from what moves over them together."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device, Hub
from panpipe.core.cluster.links.shared import groups_to_measure, shared_links
from panpipe.core.cluster.routing import Link
from panpipe.simulators.network import fair_rates


def rates(cluster, flows):
    """Max-min rates of flows between devices, by number."""
    routes = [[(link.a, link.b, forward) for link, forward in cluster.path(*flow)] for flow in flows]
    capacity = {}
    for link in cluster.links:
        capacity[link.a, link.b, True] = capacity[link.a, link.b, False] = link.bytes_per_s
    return fair_rates(routes, [float("inf")] * len(flows), capacity)[0]


def measured(cluster):
    """What a profile of the cluster measures, without noise."""
    count = len(cluster.devices)
    totals = {
        group: sum(rates(cluster, [(a, b) for a in group for b in range(count) if b not in group]))
        for group in groups_to_measure(["host"] * count)
    }
    latencies = [[cluster.transfer_s(a, b, 0) for b in range(count)] for a in range(count)]
    alone = {pair: rates(cluster, [pair])[0] for pair in itertools.permutations(range(count), 2)}
    return totals, alone, latencies


def found(cluster, tolerance=1e-6):
    names = [device.name for device in cluster.devices]
    tree = shared_links(names, *measured(cluster), tolerance)
    return Cluster(cluster.devices, tree.hubs, tree.links), tree


@st.composite
def trees(draw):
    """Devices and hubs in a random tree; devices are its leaves."""
    hubs = draw(st.integers(1, 4))
    parents = [draw(st.integers(0, hub - 1)) for hub in range(1, hubs)]
    count = draw(st.integers(2, 6))
    rate, latency = st.sampled_from([1e9, 2e9, 3e9, 5e9, 8e9, 2e10]), st.sampled_from([0.0, 1e-6, 5e-6, 2e-5])
    links = [Link(f"h{hub}", f"h{parent}", draw(rate), draw(latency)) for hub, parent in enumerate(parents, 1)]
    links += [Link(f"d{d}", f"h{draw(st.integers(0, hubs - 1))}", draw(rate), draw(latency)) for d in range(count)]
    devices = tuple(Device(f"d{d}", 1) for d in range(count))
    return Cluster(devices, tuple(Hub(f"h{hub}") for hub in range(hubs)), tuple(links))


@settings(deadline=None, max_examples=60)
@given(trees(), st.data())
def test_fit_recovers_the_predictions_of_any_tree(cluster, data):
    again, _ = found(cluster)
    pairs = list(itertools.permutations(range(len(cluster.devices)), 2))
    for a, b in pairs:
        assert again.transfer_s(a, b, 1e6) == pytest.approx(cluster.transfer_s(a, b, 1e6))
    for _ in range(4):
        flows = data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=8))
        assert rates(again, flows) == pytest.approx(rates(cluster, flows))


NODES = Cluster(
    tuple(Device(f"d{d}", 1) for d in range(4)),
    ("n0", "n1"),
    (
        *(Link(f"d{d}", f"n{d // 2}", 10e9, 1e-6) for d in range(4)),
        Link("n0", "n1", 12e9, 5e-6),
    ),
)
"""Two nodes of two devices, whose network moves little more than one of them sends."""


def test_the_network_between_two_nodes_is_a_shared_link():
    again, tree = found(NODES, tolerance=0.1)
    assert tree.shared == {"shared0": {2, 3}}
    uplink = next(link for link in again.links if {link.a, link.b} == {"shared0", "middle"})
    assert uplink.bytes_per_s == pytest.approx(12e9)
    assert uplink.latency_s == pytest.approx(5e-6)
    assert max(cut.error for cut in tree.cuts) < 1e-9


def test_noise_gives_no_shared_link_and_is_reported():
    """Ten percent that are missing here and there are no link."""
    totals, alone, latencies = measured(NODES)
    shaken = {group: total * (0.95 if sum(group) % 2 else 1.03) for group, total in totals.items()}
    tree = shared_links(["a", "b", "c", "d"], shaken, alone, latencies)
    assert tree.shared == {"shared0": {2, 3}}
    assert 0.01 < max(cut.error for cut in tree.cuts) < 0.12


def test_links_are_as_fast_as_a_pair_alone_and_the_residual_is_reported():
    """Three processes on two processors: together they get less than one pair alone."""
    groups = groups_to_measure(["host"] * 3)
    alone = dict.fromkeys(itertools.permutations(range(3), 2), 2e9)
    tree = shared_links(["a", "b", "c"], dict.fromkeys(groups, 1e9), alone, [[1e-5] * 3] * 3)
    assert {link.bytes_per_s for link in tree.links} == {2e9}
    assert [cut.error for cut in tree.cuts] == [1.0, 1.0, 1.0]
