"""A data dimension by hand: replicas on their own devices, gradients reduced after the last backward."""

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, Device, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.simulators.optimizer_step import OptimizerStep
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of

COST = StageCosts(1.0, 1.0, 1.0, optimizer_s=0.25, gradient_bytes=40)


def two_stages(**options):
    """F at 0–1 and 2.5–3.5, B at 3.5–5.5 and 7–9, as of one replica; 10 bytes a hop in 1.5 s."""
    options = {"cluster": fully_connected(4, 10**6, 10.0, 0.5), "costs": [COST] * 2, **options}
    return plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), data=2, **options)


def test_reductions_overlap_with_computation():
    # Both stages on one device: 1B ends at 4, 0B at 6; the first reduction ends at 9, and the second after it at 14.
    plan = plan_of(
        orders("0F0 1F0 1B0 0B0"), (0, 0), costs=[COST] * 2, data=2, cluster=fully_connected(2, 10**6, 10.0, 0.5)
    )
    result = simulate(plan)
    assert [(t.device, t.action.stage, t.start_s, t.end_s) for t in result.tasks] == [
        (0, 1, 4.0, 9.0),
        (0, 0, 9.0, 14.0),
        (1, 1, 4.0, 9.0),
        (1, 0, 9.0, 14.0),
    ]
    assert result.operation_times[0][1][-2:] == [14.25, 14.5]


def test_trace_has_reductions_on_a_separate_queue():
    trace = simulate(two_stages()).trace
    assert trace.devices == 4
    assert [
        (e.device, str(e.action), e.start_s, e.end_s, e.bytes) for e in trace.events if e.queue == "collectives"
    ] == [
        (1, "1REDUCE_GRAD", 5.5, 10.5, 40),
        (3, "1REDUCE_GRAD", 5.5, 10.5, 40),
        (0, "0REDUCE_GRAD", 9.0, 14.0, 40),
        (2, "0REDUCE_GRAD", 9.0, 14.0, 40),
    ]
    assert {e.queue for e in trace.events if e.device == 3} == {"compute", "collectives", "send to 2", "receive from 2"}


def test_a_barrier_waits_for_every_replica():
    result = simulate(two_stages(), optimizer=OptimizerStep.BARRIER)
    # The last gradients are there at 14; the 16 bytes of overflows and scales to and fro take 4.2 s.
    assert [starts[-1] for starts, _ in result.operation_times] == pytest.approx([18.2] * 4)


def test_post_validation_messages_stay_within_a_replica():
    result = simulate(two_stages(), optimizer=OptimizerStep.POST_VALIDATION)
    starts = [starts[-1] for starts, _ in result.operation_times]
    # From device 0, whose gradients are there at 14, 8 bytes to device 1 in 1.3 s; the same in the other replica.
    assert starts == pytest.approx([14.0, 15.3, 14.0, 15.3])


def test_replicas_are_placed_as_in_the_mesh():
    # Devices 0 and 2 are near each other, and so are 1 and 3: pipelines over near devices, reductions over far ones.
    names = ("a", "b", "c", "d")
    links = [Link("a", "c", 10.0, 0.5), Link("b", "d", 10.0, 0.5), Link("a", "b", 4.0, 0.0), Link("c", "d", 4.0, 0.0)]
    cluster = Cluster(tuple(Device(name, 10**6) for name in names), (), tuple(links))
    plan = two_stages(cluster=cluster, mesh_devices=((0, 2), (1, 3)))
    result = simulate(plan)
    assert [device.name for device in result.devices] == ["a", "c", "b", "d"]
    assert result.operation_times[0][0][:2] == [0.0, 7.0]
    assert [r.end_s - r.start_s for r in result.tasks] == [10.0] * 4


def test_replicas_contend_for_a_link_between_nodes():
    # Both pipelines cross the one link between two switches: 5 bytes/s each.
    names = ("a", "b", "c", "d")
    links = [Link(name, "left" if name in "ac" else "right", float("inf"), 0.0) for name in names]
    cluster = Cluster(
        tuple(Device(n, 10**6) for n in names), ("left", "right"), (*links, Link("left", "right", 10.0, 0.0))
    )
    costs = [evolve(COST, gradient_bytes=0)] * 2
    result = simulate(two_stages(cluster=cluster, costs=costs, edges=(StageEdge(0, 1, 10, 20),)))
    assert result.transfer_times[0, 1] == result.transfer_times[2, 3] == ([1.0], [3.0])
    assert result.transfer_times[1, 0] == result.transfer_times[3, 2] == ([6.0], [10.0])
