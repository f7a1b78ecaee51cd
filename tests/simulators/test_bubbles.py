"""Why devices idle, by hand."""

from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.plan.plan import TiedWeight
from panpipe.simulators.bubbles import CAUSES
from panpipe.simulators.delays import queue_delays
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of


def test_idle_time_of_two_stages_by_cause():
    # Device 0: 0F0 0–1, B's gradient is sent at 5.5 and there at 7, 0B0 7–9, sum of the tied weight until 14, STEP.
    # Device 1: 1F0 2.5–3.5, 1B0 3.5–5.5, sum until 14, STEP until 15; device 0's STEP ends at 14.25.
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0"),
        (0, 1),
        costs=[StageCosts(1.0, 1.0, 1.0, optimizer_s=0.25), StageCosts(1.0, 1.0, 1.0, optimizer_s=1.0)],
        cluster=fully_connected(2, 10**6, 10.0, 0.5),
        tied=(TiedWeight("embedding", (0, 1), 20),),
    )
    first, second = simulate(plan).bubbles
    assert list(first) == list(CAUSES)
    assert first == {
        "warm-up": 0.0,
        "dependency": 4.5,
        "communication": 1.5,
        "contention": 0.0,
        "host copy": 0.0,
        "reduction": 5.0,
        "optimizer": 0.0,
        "cool-down": 0.75,
    }
    assert second == {
        "warm-up": 2.5,
        "dependency": 0.0,
        "communication": 0.0,
        "contention": 0.0,
        "host copy": 0.0,
        "reduction": 8.5,
        "optimizer": 0.0,
        "cool-down": 0.0,
    }


def test_contention_is_separate_from_communication_and_listed_by_link():
    # Devices 0 and 1 each send 20 bytes to device 2 at 1: 5 bytes/s each through its port until 5. Alone, 2 s.
    names = ("a", "b", "c")
    links = tuple(Link(name, "hub", 10.0, 0.5) for name in names)
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0", "2F0 2B0"),
        (0, 1, 2),
        cluster=Cluster(tuple(Device(name, 10**6) for name in names), (Hub("hub"),), links),
        edges=(StageEdge(0, 2, 20, 0), StageEdge(1, 2, 20, 0)),
    )
    result = simulate(plan)
    assert result.bubbles[2] == {
        "warm-up": 6.0,
        "dependency": 0.0,
        "communication": 0.0,
        "contention": 0.0,
        "host copy": 0.0,
        "reduction": 0.0,
        "optimizer": 0.0,
        "cool-down": 0.0,
    }
    # The same after an operation of its own: the wait is no warm-up any more.
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0", "3F0 2F0 2B0 3B0"),
        (0, 1, 2, 2),
        cluster=plan.prediction.cluster,
        edges=(StageEdge(0, 2, 20, 0), StageEdge(1, 2, 20, 0)),
    )
    result = simulate(plan)
    assert result.bubbles[2]["communication"] == 3.0
    assert result.bubbles[2]["contention"] == 2.0
    assert result.contention == ({}, {}, {("hub", "c"): 2.0})
    assert [(use.src, use.dst, use.delay_s) for use in result.links] == [
        ("a", "hub", 0.0),
        ("b", "hub", 0.0),
        ("hub", "c", 4.0),
    ]


def test_a_message_after_a_slow_one_in_its_queue_waits_for_the_same_link():
    # 0 → 2: 20 bytes at 1, and 20 bytes that are ready at 2. Alone they drain until 3 and until 5. With 1 → 2 of 20
    # bytes at 1 and 20 after them all drain at half the rate, until 5 and until 9.
    names = ("a", "b", "c")
    links = tuple(Link(name, "hub", 10.0, 0.0) for name in names)
    plan = plan_of(
        orders("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "3F0 3F1 2F0 2F1 2B0 2B1 3B0 3B1"),
        (0, 1, 2, 2),
        costs=[
            StageCosts(1.0, 1.0, 1.0),
            StageCosts(1.0, 9.0, 9.0),
            StageCosts(0.5, 1.0, 1.0),
            StageCosts(0.5, 1.0, 1.0),
        ],
        cluster=Cluster(tuple(Device(name, 10**6) for name in names), (Hub("hub"),), links),
        edges=(StageEdge(0, 2, 20, 0), StageEdge(1, 2, 0, 0)),
    )
    first, second = simulate(plan).queue_times[0, 2].flows
    assert (first.start_s, first.drained_s, second.start_s, second.drained_s) == (1.0, 3.0, 3.0, 5.0)
    plan = evolve(plan, edges=(StageEdge(0, 2, 20, 0), StageEdge(1, 2, 20, 0)))
    result = simulate(plan)
    queues = result.queue_times
    assert [(flow.start_s, flow.drained_s) for flow in queues[0, 2].flows] == [(1.0, 5.0), (5.0, 9.0)]
    delays = queue_delays(queues[0, 2].flows, queues[0, 2].ready_s)
    assert delays == [{("hub", "c"): 2.0}, {("hub", "c"): 4.0}]


def test_contention_of_a_reduction_is_listed_by_link():
    # Two stages, two replicas; the reduction of stage 1 (5.5 on) shares a's link with nothing, and that of stage 0 too;
    # with every device behind one port they share with the gradients that go back.
    names = ("a", "b", "c", "d")
    links = tuple(Link(name, "hub", 10.0, 0.0) for name in names)
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0"),
        (0, 1),
        data=2,
        costs=[StageCosts(1.0, 1.0, 1.0, gradient_bytes=0), StageCosts(1.0, 1.0, 1.0, gradient_bytes=20)],
        cluster=Cluster(tuple(Device(name, 10**6) for name in names), (Hub("hub"),), links),
    )
    result = simulate(plan)
    # 1B ends at 5. 20 bytes b → d and back, next to 10 bytes b → a and d → c: 5 bytes/s each until 7, then 10.
    assert result.transfer_times[1, 0] == ([5.0], [7.0])
    reduction = result.tasks[-1]
    assert (reduction.action.stage, reduction.start_s, reduction.end_s) == (1, 5.0, 8.0)
    assert reduction.contention == {("b", "hub"): 1.0}  # the first of the two on its way; d's is as full
    assert result.bubbles[1]["reduction"] == 2.0
    assert result.bubbles[1]["contention"] == 1.0
    assert result.bubbles[0]["contention"] == 1.0
