"""Collectives by hand: what they move over which links, in how many steps, and how long they take alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.collectives import Algorithm, Operation, collective_phases, collective_s, ring_order
from panpipe.core.cluster.routing import Link

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = Operation
RING, TREE, HIERARCHICAL = Algorithm
OWN = fully_connected(4, 1, 10.0, 0.5)


def nodes(*sizes, port=100.0, nic=10.0, latency_s=0.0, far_s=0.0, order=None):
    """Nodes whose devices have a port each on a switch, and the switches a NIC each on one network."""
    names = [f"{node}.{i}" for node, size in enumerate(sizes) for i in range(size)]
    links = [Link(name, f"switch{name.split('.')[0]}", port, latency_s) for name in names]
    links += [Link(f"switch{node}", "network", nic, far_s) for node in range(len(sizes))]
    hubs = [Hub(f"switch{node}") for node in range(len(sizes))] + [Hub("network")]
    devices = [Device(names[i], 1) for i in (order or range(len(names)))]
    return Cluster(tuple(devices), tuple(hubs), tuple(links))


def phases(*arguments):
    return [(phase.bytes, phase.bytes_per_s, phase.latency_s) for phase in collective_phases(*arguments)]


@pytest.mark.parametrize(
    ("operation", "algorithm", "wanted"),
    [
        # 2·3/4 of 40 bytes over each edge, and six latencies.
        (ALL_REDUCE, RING, [(60.0, 10.0, 3.0)]),
        (ALL_GATHER, RING, [(30.0, 10.0, 1.5)]),
        (REDUCE_SCATTER, RING, [(30.0, 10.0, 1.5)]),
        # Trees 0–2, 2–1, 2–3 and 3–1, 1–2, 1–0, half of it each, both ways; they share the link of 1 and 2.
        (ALL_REDUCE, TREE, [(20.0, 5.0, 2.0)]),
        (ALL_GATHER, TREE, [(10.0, 10.0, 0.5), (20.0, 10.0, 0.5)]),
        (REDUCE_SCATTER, TREE, [(20.0, 10.0, 0.5), (10.0, 10.0, 0.5)]),
        # All four are as near to each other: one node.
        (ALL_REDUCE, HIERARCHICAL, [(60.0, 10.0, 3.0)]),
    ],
)
def test_all_reduce_of_four_devices_with_separate_links(operation, algorithm, wanted):
    assert phases(OWN, range(4), 40, operation, algorithm) == wanted
    assert collective_s(OWN, range(4), 40, operation, algorithm) == sum(b / rate + late for b, rate, late in wanted)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 9, 16])
def test_steps_and_bytes_of_every_count(count):
    cluster = fully_connected(count, 1, 1.0, 1.0)
    size = 64.0
    [ring] = collective_phases(cluster, range(count), size, ALL_REDUCE, RING)
    assert ring.bytes == pytest.approx(2 * (count - 1) / count * size)
    assert ring.latency_s == 2 * (count - 1)
    assert len(ring.crossings) == count
    depth = (count - 1).bit_length()
    [tree] = collective_phases(cluster, range(count), size, ALL_REDUCE, TREE)
    assert tree.bytes == size / 2
    assert tree.latency_s == 2 * depth
    assert len(tree.crossings) == 4 * (count - 1)
    for operation in (ALL_GATHER, REDUCE_SCATTER):
        doubling = collective_phases(cluster, range(count), size, operation, TREE)
        assert len(doubling) == depth
        assert sum(phase.bytes for phase in doubling) == pytest.approx((count - 1) / count * size)


def test_all_reduce_uses_the_fastest_algorithm():
    # Eight devices behind ports: a tree's inner places pass twice the bytes of it on, a ring's less.
    cluster = nodes(8, port=10.0, latency_s=1.0)
    for size, taken, other in ((40, TREE, RING), (4000, RING, TREE)):
        alone = [collective_s(cluster, range(8), size, ALL_REDUCE, algorithm) for algorithm in (None, taken, other)]
        assert alone[0] == alone[1] < alone[2]


def test_a_ring_crosses_a_node_boundary_once_each_way():
    # Edges 1 → 2 and 3 → 0 cross the NICs, each in its own direction: 60 bytes at 10 bytes/s. Latencies: a round of a
    # piece is two edges of 2 s and two of 8 s; two rounds less the two edges 2 + 8 that are nobody's.
    cluster = nodes(2, 2, latency_s=1.0, far_s=3.0)
    assert ring_order(cluster, (0, 1, 2, 3)) == (0, 1, 2, 3)
    assert phases(cluster, range(4), 40, ALL_REDUCE, RING) == [(60.0, 10.0, 2 * 20.0 - 10.0)]


def test_hierarchical_all_reduce_sends_a_part_between_nodes():
    # Two nodes of two: 20 bytes of each in the node, 20 bytes across of each of two (twice 1/2 of 20) over one NIC, and
    # 20 bytes in the node again.
    cluster = nodes(2, 2, latency_s=1.0, far_s=3.0)
    assert phases(cluster, range(4), 40, ALL_REDUCE, HIERARCHICAL) == [
        (20.0, 100.0, 2.0),
        (20.0, 5.0, 2 * 8.0),
        (20.0, 100.0, 2.0),
    ]
    assert phases(cluster, range(4), 40, REDUCE_SCATTER, HIERARCHICAL) == [(20.0, 100.0, 2.0), (10.0, 5.0, 8.0)]
    assert phases(cluster, range(4), 40, ALL_GATHER, HIERARCHICAL) == [(10.0, 5.0, 8.0), (20.0, 100.0, 2.0)]


@given(st.integers(2, 9), st.sampled_from(Operation), st.sampled_from(Algorithm), st.integers(1, 1000), st.randoms())
def test_collective_time_does_not_depend_on_the_order_and_grows_with_bytes(count, operation, algorithm, size, random):
    cluster = nodes(count // 2, count - count // 2, latency_s=0.5, far_s=1.0)
    members = list(range(count))
    alone = collective_s(cluster, members, size, operation, algorithm)
    random.shuffle(members)
    assert collective_s(cluster, members, size, operation, algorithm) == alone
    assert collective_s(cluster, members, 2 * size, operation, algorithm) >= alone
    assert collective_s(cluster, members, size, operation) <= alone
    # Nobody has less to move than what every algorithm must: 2(n−1)/n of it out of each device, or half of that.
    least = (2 if operation is ALL_REDUCE else 1) * (count - 1) / count * size
    sent = dict.fromkeys(members, 0.0)
    for phase in collective_phases(cluster, members, size, operation, algorithm):
        for link, from_a in phase.crossings:
            for device in members:
                if from_a and link.a == cluster.devices[device].name:
                    sent[device] += phase.bytes
    assert sum(sent.values()) >= least * count * (1 - 1e-9) * (1 if algorithm is not TREE else 0.5)


def test_ring_orders_members_of_a_node_next_to_each_other():
    cluster = nodes(2, 2, order=(0, 2, 1, 3))  # devices 0 and 2 in the first node, 1 and 3 in the second
    assert ring_order(cluster, (0, 1, 2, 3)) == (0, 2, 1, 3)
    assert phases(cluster, range(4), 40, ALL_REDUCE, RING) == [(60.0, 10.0, 0.0)]


def test_ring_orders_bridged_pairs_next_to_each_other():
    # Four devices on PCIe, 0–3 and 1–2 with bridges.
    links = [Link(f"d{i}", "root", 24.0, 0.0) for i in range(4)]
    links += [Link("d0", "d3", 48.0, 0.0), Link("d1", "d2", 48.0, 0.0)]
    cluster = Cluster(tuple(Device(f"d{i}", 1) for i in range(4)), (Hub("root", "host"),), tuple(links))
    assert ring_order(cluster, (0, 1, 2, 3)) == (0, 3, 1, 2)
