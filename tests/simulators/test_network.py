"""The network by hand: shared links, full duplex, queues, rendezvous and eager sends."""

import pytest
from panpipe.core.cluster import Cluster, Device, Link
from panpipe.core.costs import StageCosts, StageEdge
from panpipe.core.lowering import lower
from panpipe.simulators.run import simulate

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


def test_a_transfer_that_joins_slows_the_one_that_is_there():
    # Alone from 1 to 2 (10 of 20 bytes), half the rate until 4; the second has 10 of 20 left then, until 5.
    first, second, _ = two_into_one((1.0, 2.0), (20, 20))
    assert first == (1.0, 4.0)
    assert second == (2.0, 5.0)


def test_what_a_slow_port_leaves_goes_to_the_other():
    # Device 0's port moves 2 bytes/s, so device 1 has 8 of the 10 of device 2's port.
    first, second, _ = two_into_one((1.0, 1.0), (20, 80), rates=(2.0, 100.0, 10.0))
    assert first == (1.0, 11.0)
    assert second == (1.0, 11.0)


def test_latency_is_added_once_and_occupies_nothing():
    # Both latencies of the path, behind the time on the links.
    first, second, _ = two_into_one((1.0, 3.0), (20, 10), latency_s=4.0)
    assert first == (1.0, 3.0 + 8.0)
    assert second == (3.0, 4.0 + 8.0)


def test_zero_bytes_take_the_latency_alone_beside_others():
    first, second, _ = two_into_one((1.0, 1.0), (0, 10), latency_s=1.0)
    assert first == (1.0, 3.0)
    assert second == (1.0, 4.0)


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


def test_compute_does_not_wait_for_its_sends():
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0"),
        (0, 1),
        costs=forward_s(1.0, 1.0),
        cluster=star((1.0, 1.0)),
        edges=(StageEdge(0, 1, 100, 0),),
    )
    assert simulate(plan).operation_times[0][1][:2] == [1.0, 3.0]
