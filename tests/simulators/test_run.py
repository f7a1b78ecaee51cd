"""A whole step: by hand, against the longest path, and the laws of every run."""

import re
from itertools import pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.actions import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS
from panpipe.core.cluster.cluster import Cluster, Device, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import TiedWeight
from panpipe.core.timing.orders import evaluate
from panpipe.core.trace.perfetto import trace_json
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of, plans

HOP = fully_connected(2, 10**6, 10.0, 0.5)


def two_stages(**options):
    return plan_of(
        orders("0F0 0B0", "1F0 1B0"),
        (0, 1),
        costs=[StageCosts(1.0, 1.0, 1.0, optimizer_s=0.25)] * 2,
        cluster=HOP,
        **options,
    )


def test_step_of_two_stages_and_one_hop():
    # 10 bytes at 10 bytes/s and 0.5 s: 1.5 s a hop.
    result = simulate(two_stages())
    assert result.operation_times == (
        ([0.0, 7.0, 9.0], [1.0, 9.0, 9.25]),
        ([2.5, 3.5, 5.5], [3.5, 5.5, 5.75]),
    )
    assert result.step_s == 9.25
    assert result.busy_s == (3.0, 3.0)
    assert result.bubble_ratio == pytest.approx(1 - 3 / 9.25)


def test_the_trace_of_two_stages():
    trace = simulate(two_stages()).trace
    assert (trace.source, trace.devices, trace.step_s) == ("simulated", 2, 9.25)
    assert [(e.device, e.queue, str(e.action), e.start_s, e.end_s, e.bytes) for e in trace.events] == [
        (0, "compute", "0F0", 0.0, 1.0, 0),
        (0, "send to 1", "0SEND_F0>1", 1.0, 2.5, 10),
        (1, "receive from 0", "1RECV_F0<0", 1.0, 2.5, 10),
        (1, "compute", "1F0", 2.5, 3.5, 0),
        (1, "compute", "1B0", 3.5, 5.5, 0),
        (0, "receive from 1", "0RECV_B0<1", 5.5, 7.0, 10),
        (1, "compute", "1STEP", 5.5, 5.75, 0),
        (1, "send to 0", "1SEND_B0>0", 5.5, 7.0, 10),
        (0, "compute", "0B0", 7.0, 9.0, 0),
        (0, "compute", "0STEP", 9.0, 9.25, 0),
    ]


def test_tied_weight_is_summed_after_its_last_stage():
    plan = two_stages(tied=(TiedWeight("embedding", (0, 1), 20),))
    result = simulate(plan)
    # Stage 0 is there at 9; 20 bytes take 2.5 s in each direction; the steps of both stages follow.
    assert [(r.device, r.action.stage, r.issued_s, r.start_s, r.end_s) for r in result.tasks] == [
        (0, 0, 9.0, 9.0, 11.5),
        (1, 1, 5.5, 9.0, 11.5),
    ]
    assert [starts[-1] for starts, _ in result.operation_times] == [11.5, 11.5]
    assert result.step_s == 11.75
    reduced = [(e.device, e.start_s, e.end_s) for e in result.trace.events if e.action.kind == "REDUCE_TIED"]
    assert reduced == [(1, 5.5, 11.5), (0, 9.0, 11.5)]


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("holds no costs", {"plan": attrs.evolve(two_stages(), prediction=None)}),
        ("holds no cluster", {"plan": attrs.evolve(two_stages(), prediction=None), "costs": [StageCosts(1, 1, 1)] * 2}),
        ("1 costs for 2 stages", {"plan": two_stages(), "costs": [StageCosts(1, 1, 1)]}),
        ("needs 2 devices and the cluster has 1", {"plan": two_stages(), "cluster": fully_connected(1, 9, 1.0, 0.0)}),
        ("needs 4 devices and the cluster has 2", {"plan": two_stages(data=2)}),
        ("no link connects device 0", {"plan": two_stages(), "cluster": Cluster((Device("a", 1), Device("b", 1)))}),
        (
            "plan deadlocks: device 0 at 0B0, device 1 at 1F1 wait",
            {"plan": plan_of(orders("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), (0, 1))},
        ),
        (
            "device 0 issues 0STEP where the plan has 0REDUCE_TIED",
            {
                "plan": two_stages(tied=(TiedWeight("w", (0, 1), 1),)),
                "lowered": orders("0F0 0SEND_F0>1 0RECV_B0<1 0B0 0STEP", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1STEP"),
            },
        ),
    ],
)
def test_invalid_simulation_requests_are_refused(message, arguments):
    with pytest.raises(RequestError, match=message):
        simulate(**arguments)


# Laws


@given(plans(), st.sampled_from([0.0, 0.5, 3.0]))
def test_eager_over_latency_alone_is_the_longest_path(plan, latency_s):
    cluster = fully_connected(plan.devices, 10**9, float("inf"), latency_s)
    result = simulate(plan, cluster=cluster, eager=True)
    wanted = evaluate(
        plan.device_actions, plan.placement, plan.prediction.costs, edges=plan.edges, hop_s=latency_s,
        recompute=plan.memory.recompute,
    )  # fmt: skip
    for times, actions, wanted_starts, wanted_ends in zip(
        result.operation_times, result.queues.compute, wanted.starts, wanted.ends, strict=True
    ):
        starts, ends = (
            [time for time, action in zip(column, actions, strict=True) if action.kind in COMPUTE_KINDS]
            for column in times
        )
        assert starts == pytest.approx(wanted_starts)
        assert ends == pytest.approx(wanted_ends)
    assert result.busy_s == pytest.approx(wanted.busy)
    assert simulate(plan, cluster=cluster, eager=True).peak_saved_bytes == pytest.approx(wanted.peak_memory)


def on_one_switch(plan, bytes_per_s, names="d"):
    devices = tuple(Device(f"{names}{i}", 10**9) for i in range(plan.devices))
    return Cluster(devices, ("hub",), tuple(Link(device.name, "hub", bytes_per_s, 0.25) for device in devices))


@given(plans(), st.booleans(), st.booleans())
def test_bytes_are_conserved_and_queues_keep_their_order(plan, eager, shared):
    cluster = on_one_switch(plan, 8.0) if shared else plan.prediction.cluster
    result = simulate(plan, cluster=cluster, eager=eager)
    moved = plan.microbatches * sum(
        edge.bytes + edge.gradient_bytes for edge in plan.edges if plan.placement[edge.src] != plan.placement[edge.dst]
    )
    events = result.trace.events
    assert sum(event.bytes for event in events if event.action.kind in SEND_KINDS) == moved
    assert sum(event.bytes for event in events if event.action.kind in RECV_KINDS) == moved
    hops = 2 if shared else 1
    summed = 2 * sum(weight.bytes for weight in plan.tied if plan.placement[-1] != plan.placement[0])
    assert sum(use.bytes for use in result.links) == hops * (moved + summed)
    assert all(0 <= use.utilisation <= 1 + 1e-9 for use in result.links)
    for starts, arrivals in result.transfer_times.values():
        assert starts == sorted(starts)
        assert arrivals == sorted(arrivals)
    for starts, ends in result.operation_times:
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert all(0 <= event.start_s <= event.end_s <= result.step_s for event in events if event.queue == "compute")


@given(plans(), st.booleans())
def test_more_bandwidth_never_slows_a_plan_on_links_of_its_own(plan, eager):
    def step_s(bytes_per_s):
        cluster = fully_connected(plan.devices, 10**9, bytes_per_s, 0.5)
        return simulate(plan, cluster=cluster, eager=eager).step_s

    steps = [step_s(rate) for rate in (1.0, 4.0, 64.0, float("inf"))]
    assert all(later <= sooner + 1e-9 for sooner, later in pairwise(steps))


@given(plans(), st.booleans())
def test_the_same_input_gives_the_same_bytes_whatever_the_devices_are_called(plan, eager):
    first, again, renamed = (
        trace_json(simulate(plan, cluster=on_one_switch(plan, 8.0, names), eager=eager).trace)
        for names in ("d", "d", "gpu")
    )
    assert first == again
    assert first == re.sub(r"\bgpu(?=\d)", "d", renamed)


@given(plans())
def test_busy_and_idle_time_add_up_to_the_step(plan):
    result = simulate(plan)
    for device, idle in enumerate(result.bubbles):
        assert min(idle.values()) >= -1e-9
        steps = sum(plan.prediction.costs[stage.index].optimizer_s for stage in plan.stages_on(device))
        assert sum(idle.values()) + result.busy_s[device] + steps == pytest.approx(result.step_s)
