"""The network by hand: shared links, full duplex, queues, rendezvous and eager sends."""

import pytest
from panpipe.core.cluster.cluster import Cluster, Device, Hub
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.lowering.lowering import lower
from panpipe.simulators.network import Flow, Network
from panpipe.simulators.run import simulate
from simpy import Environment
from simpy.events import Timeout

from ..support.plans import orders, plan_of


def star(rates, latency_s=0.0):
    """Every device behind one port of one switch, with its own rate in bytes/s."""
    devices = tuple(Device(f"d{i}", 10**6) for i in range(len(rates)))
    return Cluster(
        devices, ("hub",), tuple(Link(d.name, "hub", r, latency_s) for d, r in zip(devices, rates, strict=True))
    )


def forward_s(*times):
    return [StageCosts(time, 1.0, 1.0) for time in times]


def transfers(result, src, dst):
    return list(zip(*result.transfer_times[src, dst], strict=True))


def two_into_one(times, sizes, rates=(10.0, 10.0, 10.0), latency_s=0.0):
    """Devices 0 and 1 send to device 2; nothing comes back."""
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0", "2F0 2B0"),
        (0, 1, 2),
        costs=forward_s(*times, 1.0),
        cluster=star(rates, latency_s),
        edges=(StageEdge(0, 2, sizes[0], 0), StageEdge(1, 2, sizes[1], 0)),
    )
    result = simulate(plan)
    return transfers(result, 0, 2)[0], transfers(result, 1, 2)[0], result


def test_two_transfers_share_a_link_until_one_has_drained():
    # 5 bytes/s each until 10 bytes are through at 3; the other then has 20 left for itself.
    first, second, result = two_into_one((1.0, 1.0), (10, 30))
    assert first == (1.0, 3.0)
    assert second == (1.0, 5.0)
    assert result.operation_times[2][0][0] == 5.0


def test_latency_is_added_once_and_occupies_nothing():
    # Both latencies of the path, after the time on the links.
    first, second, _ = two_into_one((1.0, 3.0), (20, 10), latency_s=4.0)
    assert first == (1.0, 3.0 + 8.0)
    assert second == (3.0, 4.0 + 8.0)


def test_the_two_directions_of_a_link_do_not_share():
    # 0 → 1 and 1 → 0 at the same time, each at the full rate.
    plan = plan_of(
        orders("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"),
        (0, 1, 1, 0),
        costs=forward_s(1.0, 1.0, 1.0, 1.0),
        cluster=star((10.0, 10.0)),
        edges=(StageEdge(0, 2, 10, 0), StageEdge(1, 3, 10, 0)),
    )
    result = simulate(plan)
    assert transfers(result, 0, 1) == [(1.0, 2.0)]
    assert transfers(result, 1, 0) == [(1.0, 2.0)]


def test_a_queue_moves_one_message_after_the_other_and_latency_overlaps():
    plan = plan_of(
        orders("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"),
        (0, 1),
        costs=forward_s(1.0, 1.0),
        cluster=star((10.0, 10.0), 2.5),
        edges=(StageEdge(0, 1, 20, 0),),
    )
    assert transfers(simulate(plan), 0, 1) == [(1.0, 8.0), (3.0, 10.0)]


@pytest.mark.parametrize(("eager", "start_s"), [(False, 10.0), (True, 1.0)])
def test_a_rendezvous_waits_for_its_receive_and_an_eager_send_does_not(eager, start_s):
    # Device 1 works on stage 2, which reads nothing, until 10; without prefetch its receive is posted then.
    plan = plan_of(
        orders("0F0 0B0", "2F0 1F0 1B0 2B0"),
        (0, 1, 1),
        costs=forward_s(1.0, 1.0, 10.0),
        cluster=star((10.0, 10.0), 0.5),
        edges=(StageEdge(0, 1, 10, 0),),
    )
    result = simulate(plan, eager=eager, lowered=lower(plan, 0))
    assert transfers(result, 0, 1) == [(start_s, start_s + 2.0)]
    assert result.operation_times[1][0][:2] == [0.0, max(10.0, start_s + 2.0)]


def flows(cluster, *messages):
    """When each of the messages ``(start, src, dst, bytes)`` has arrived, all on queues of their own."""
    environment = Environment()
    network = Network(environment)
    arrived = {}
    for key, (start_s, src, dst, size) in enumerate(messages):
        path = cluster.path(src, dst)
        route = network.route(path, sum(link.latency_s for link, _ in path), min(link.bytes_per_s for link, _ in path))
        flow = Flow(route, size, lambda key=key: arrived.setdefault(key, environment.now))
        Timeout(environment, start_s).callbacks.append(lambda _, flow=flow: network.start(flow))
    network.find_shared()
    environment.run()
    return [arrived[key] for key in range(len(messages))]


def test_a_long_flow_gets_what_its_tightest_link_leaves():
    # The parking lot: one flow over both of two links, and one flow on each. a → c and a → b share 6 bytes/s of the
    # first, so a → c has 3, and d → c has 9 of the second's 12.
    links = (Link("a", "x", 100.0, 0.0), Link("b", "y", 100.0, 0.0), Link("c", "z", 100.0, 0.0))
    links = (*links, Link("d", "y", 100.0, 0.0), Link("x", "y", 6.0, 0.0), Link("y", "z", 12.0, 0.0))
    cluster = Cluster(tuple(Device(name, 1) for name in "abcd"), tuple(map(Hub, "xyz")), links)
    assert flows(cluster, (0.0, 0, 2, 12), (0.0, 0, 1, 12), (0.0, 3, 2, 36)) == [4.0, 4.0, 4.0]


def hosts(memory=100.0):
    """Four devices, pairs behind PCIe switches, root ports of a host, and the host's memory: 24 bytes/s each."""
    hubs = (Hub("switch0", "pcie"), Hub("switch1", "pcie"), Hub("root", "pcie"), Hub("memory", "host"))
    links = [Link(f"d{i}", f"switch{i // 2}", 24.0, 0.5) for i in range(4)]
    links += [
        Link("switch0", "root", 24.0, 0.5),
        Link("switch1", "root", 24.0, 0.5),
        Link("root", "memory", memory, 0.0),
    ]
    return Cluster(tuple(Device(f"d{i}", 1) for i in range(4)), hubs, tuple(links))


def test_a_staged_copy_goes_through_the_memory_of_the_host():
    names = [(link.a, link.b, from_a) for link, from_a in hosts().path(0, 1)]
    up = [("d0", "switch0", True), ("switch0", "root", True), ("root", "memory", True)]
    assert names == [*up, ("root", "memory", False), ("switch0", "root", False), ("d1", "switch0", False)]
    # It moves in pieces: 48 bytes at 24 bytes/s, and four latencies.
    assert flows(hosts(), (0.0, 0, 1, 48)) == [4.0]
