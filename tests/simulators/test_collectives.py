"""Collectives on the network: alone as long as given, and next to others as the links allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device, Hub
from panpipe.core.cluster.collectives import Algorithm, Operation, collective_phases, collective_s
from panpipe.core.cluster.routing import Link
from panpipe.simulators.collectives import Collective
from panpipe.simulators.network.flows import Shipment
from panpipe.simulators.network.network import Network
from simpy import Environment
from simpy.events import Timeout


def two_nodes(near, port=100.0, nic=10.0, latency_s=0.0):
    """Twice ``near`` devices with a port each on their node's switch, and a NIC for each switch."""
    devices = [Device(f"{node}.{i}", 1) for node in "ab" for i in range(near)]
    links = [Link(device.name, f"switch {device.name[0]}", port, latency_s) for device in devices]
    links += [Link(f"switch {node}", "network", nic, latency_s) for node in "ab"]
    return Cluster(tuple(devices), (Hub("switch a"), Hub("switch b"), Hub("network")), tuple(links))


def run(cluster, collectives=(), messages=()):
    """Ends of collectives ``(start, members, bytes, algorithm)`` and of messages ``(start, src, dst, bytes)``."""
    environment = Environment()
    network = Network(environment)
    ends = {}

    def at(start_s, call):
        Timeout(environment, start_s).callbacks.append(lambda _: call())

    for key, (start_s, members, size, algorithm) in enumerate(collectives):
        phases = collective_phases(cluster, members, size, Operation.ALL_REDUCE, algorithm)
        collective = Collective(network, [[phase] for phase in phases])
        collective.on_end.append(lambda key=key: ends.setdefault(("collective", key), environment.now))
        at(start_s, collective.start)
    for key, (start_s, src, dst, size) in enumerate(messages):
        path = cluster.path(src, dst)
        route = network.route(path, sum(link.latency_s for link, _ in path), min(link.bytes_per_s for link, _ in path))
        flow = Shipment(route, size, lambda key=key: ends.setdefault(("message", key), environment.now))
        at(start_s, lambda flow=flow: network.start(flow))
    network.find_shared()
    environment.run()
    return [ends["collective", key] for key in range(len(collectives))] + [
        ends["message", key] for key in range(len(messages))
    ]


@given(st.integers(1, 4), st.sampled_from([*Algorithm, None]), st.integers(0, 500), st.sampled_from([0.0, 0.25]))
def test_collective_without_contention_takes_the_time_of_the_formula(near, algorithm, size, latency_s):
    cluster = two_nodes(near, latency_s=latency_s)
    members = range(2 * near)
    wanted = collective_s(cluster, members, size, Operation.ALL_REDUCE, algorithm)
    assert run(cluster, [(0.0, members, size, algorithm)]) == [pytest.approx(wanted)]


def test_a_ring_around_a_node_boundary_shares_the_nic_with_a_message():
    # 2·3/4 of 40 bytes over each edge; one edge and the message share 10 bytes/s until the message's 30 are through at
    # 6, when half of the ring's 60 are.
    cluster = two_nodes(2)
    assert run(cluster, [(0.0, range(4), 40, Algorithm.RING)], [(0.0, 1, 2, 30)]) == [9.0, 6.0]
    # A message within a node has 90 left of its port's 100 while the ring takes 10: nobody is in anybody's way.
    assert run(cluster, [(0.0, range(4), 40, Algorithm.RING)], [(0.0, 0, 1, 90)]) == [6.0, pytest.approx(1.0)]


def test_two_rings_share_a_nic():
    # Of members 0 and 2, and of 1 and 3: 40 bytes each way of each, 5 bytes/s each.
    cluster = two_nodes(2)
    rings = [(0.0, (0, 2), 40, Algorithm.RING), (0.0, (1, 3), 40, Algorithm.RING)]
    assert run(cluster, rings) == [8.0, 8.0]
    # The second one starts when half of the first is through.
    assert run(cluster, [rings[0], (2.0, *rings[1][1:])]) == [6.0, 8.0]


def test_a_ring_counts_as_often_as_it_crosses():
    # Three nodes of one device in a row: the way round comes back over both cables. Next to it a message 0 → 2.
    links = (Link("a", "left", 12.0, 0.0), Link("b", "left", 12.0, 0.0), Link("left", "right", 12.0, 0.0))
    links = (*links, Link("c", "right", 12.0, 0.0), Link("d", "right", 12.0, 0.0))
    cluster = Cluster(tuple(Device(name, 1) for name in "abcd"), (Hub("left"), Hub("right")), links)
    order_alone = run(cluster, [(0.0, (0, 1, 2, 3), 24, Algorithm.RING)])
    assert order_alone == [3.0]  # 36 bytes over each edge, one edge each way between left and right
    tree = [(0.0, (0, 1, 2, 3), 24, Algorithm.TREE)]
    # Two trees of three edges; 0–2 and 2–1, 1–2 and 3–1 cross the cable each way: four times 12 bytes at 3 bytes/s.
    assert run(cluster, tree) == [4.0]
    # A fifth share for a message of 12 bytes: 2.4 bytes/s until 5, when tree and message are through.
    assert run(cluster, tree, [(0.0, 0, 2, 12)]) == [pytest.approx(5.0), pytest.approx(5.0)]


def test_phases_follow_each_other_and_each_contends_with_what_is_there_then():
    # Within nodes 20 bytes at 100; across twice 20 bytes at 5, from 0.2 on, next to a message of 10 bytes from 1.2 on.
    cluster = two_nodes(2)
    hierarchical = (0.0, range(4), 40, Algorithm.HIERARCHICAL)
    assert run(cluster, [hierarchical]) == [pytest.approx(4.4)]
    # 5 of 20 bytes until 1.2; thirds until the message is through at 4.2; 15 − 10 left at 5: 5.2; and 0.2.
    assert run(cluster, [hierarchical], [(1.2, 0, 2, 10)]) == [pytest.approx(5.4), pytest.approx(4.2)]
