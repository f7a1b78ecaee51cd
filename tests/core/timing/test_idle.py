"""Why a step is not faster: causes by hand, and the law that they add up."""

import pytest
from attrs import evolve
from hypothesis import given, settings
from panpipe.core.cluster.cluster import Cluster, Device
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.plan.plan import MemoryPolicy
from panpipe.core.timing.idle import (
    CAUSES,
    FILL_AND_DRAIN,
    IMBALANCE,
    MEMORY,
    MESSAGES,
    RECOMPUTATION,
    SHARED_LINKS,
    STEADY_STATE,
    idle_time,
)
from panpipe.simulators.run import alone_s, simulate

from ...support.plans import orders, plan_of, plans, scheduled


def explained(plan, **options):
    costs, cluster = plan.prediction.costs, plan.mesh.arrange(plan.prediction.cluster)
    return idle_time(
        plan, costs, simulate(plan).step_s, lambda run, update: alone_s(run, costs, cluster, update), **options
    )


def causes(plan, **options):
    return {cause: seconds for cause, seconds in explained(plan, **options).causes.items() if seconds}


@settings(max_examples=40)
@given(plans())
def test_causes_add_up_to_the_idle_time(plan):
    found = explained(plan)
    result = simulate(plan)
    assert list(found.causes) == list(CAUSES)
    assert found.step_s == result.step_s
    once = simulate(evolve(plan, memory=MemoryPolicy()))
    assert found.compute_s == pytest.approx(sum(once.busy_s) / plan.devices)
    assert sum(found.causes.values()) == pytest.approx(found.step_s - found.compute_s, rel=1e-9, abs=1e-9)
    assert min(found.causes.values()) >= 0


def test_equal_stages_without_delays_fill_and_drain():
    # (P − 1)(F + B) of every device, and nothing else.
    assert causes(scheduled("1f1b", 4, 8)) == {FILL_AND_DRAIN: 3 * 3.0}


def test_a_slow_device_is_imbalance():
    slow = [StageCosts(1.0, 1.0, 1.0), StageCosts(2.0, 2.0, 2.0)]
    found = causes(scheduled("gpipe", 2, 4, costs=slow))
    # 1 + 4 × 6 + 2 seconds; the slow device is busy for 24 of them, the mean is 18.
    assert found == {FILL_AND_DRAIN: 27 - 24, IMBALANCE: 24 - 18}


def shared_uplink(rate: float) -> Cluster:
    """Two devices that send through one switch to two others."""
    names = "abcd"
    devices = tuple(Device(name, 10**9) for name in names)
    links = [Link("a", "left", 1e9, 0.0), Link("b", "left", 1e9, 0.0), Link("left", "right", rate, 0.0)]
    links += [Link("right", "c", 1e9, 0.0), Link("right", "d", 1e9, 0.0)]
    return Cluster(devices, ("left", "right"), tuple(links))


def test_two_flows_on_one_link_contend():
    plan = plan_of(orders("0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0"), (0, 1, 2, 3), edges=[])
    edges = [edge for edge in scheduled("gpipe", 4, 1).edges if edge.src == 0]
    across = [evolve(edges[0], src=0, dst=2, gradient_bytes=0), evolve(edges[0], src=1, dst=3, gradient_bytes=0)]
    plan = evolve(plan, edges=tuple(across), prediction=evolve(plan.prediction, cluster=shared_uplink(10.0)))
    # Both messages of 10 bytes take 2 s together and 1 s alone; the backwards need no message.
    found = explained(plan, waits={"left → right": 3.0, "a → left": 1.0, "b → left": 0.0})
    assert found.causes[SHARED_LINKS] == 1.0
    assert found.causes[MESSAGES] == 1.0
    assert found.by_link == {"left → right": 0.75, "a → left": 0.25}


def test_what_a_faster_order_would_save_is_the_memory_limit():
    plan = scheduled("1f1b", 2, 4)
    assert causes(plan, unlimited_s=13.0) == {FILL_AND_DRAIN: 1.0, MEMORY: 2.0}
    assert causes(plan, unlimited_s=20.0) == {FILL_AND_DRAIN: 3.0}
    assert causes(plan, unlimited_s=1.0) == {MEMORY: 3.0}  # never more than there is


def test_waiting_in_the_steady_state_is_dependency():
    # One microbatch after the other: each device waits 3 s between two of them, the first and last waits aside.
    plan = plan_of(orders("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"), (0, 1))
    assert causes(plan) == {FILL_AND_DRAIN: 4.5, STEADY_STATE: 4.5}


def test_recomputing_where_nothing_waits_is_a_cause():
    plan = plan_of(orders("0F0 0F1 0B0 0B1"), (0,), recompute=(0,))
    assert causes(plan) == {RECOMPUTATION: 2.0}
