"""The result of a simulated step, from plans small enough to compute by hand."""

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.trace.trace import LinkTrack
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of

COSTS = StageCosts(forward_s=1, backward_input_s=1, backward_weight_s=1, saved_bytes=5, parameter_bytes=100)


def result_of(*rows, costs=COSTS, latency_s=0.0, rate=float("inf"), size=10):
    edges = [StageEdge(i, i + 1, size, size) for i in range(len(rows) - 1)]
    plan = plan_of(
        orders(*rows), tuple(range(len(rows))), costs=[costs] * len(rows), edges=edges,
        cluster=fully_connected(len(rows), 10**9, rate, latency_s),
    )  # fmt: skip
    return simulate(plan)


@pytest.fixture
def two():
    return result_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", size=1)


def test_times_of_two_devices(two):
    # device 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7; device 0: B1 7-9
    assert two.step_s == 9
    assert two.busy_s == (6, 6)
    assert two.stage_span_s == 9
    assert two.bubble_ratio == pytest.approx(1 - 6 / 9)
    assert two.operation_times[1] == ([1, 2, 4, 5, 7], [2, 4, 5, 7, 7])  # STEP takes no time
    assert sum(two.bubbles[0].values()) == pytest.approx(3)
    assert len(two.devices) == 2


def test_span_is_from_first_start_to_last_end(two):
    assert result_of("0F0 0B0", "1F0 1B0", latency_s=2.0).stage_span_s == 1 + 2 + 3 + 2 + 2


def test_messages_arrive_after_latency_and_bytes_over_rate():
    found = result_of("0F0 0B0", "1F0 1B0", latency_s=2.0, rate=5.0)  # 10 bytes a message
    assert found.transfer_times[0, 1] == ([1.0], [5.0])
    assert found.transfer_times[1, 0] == ([8.0], [12.0])
    assert found.step_s == 14
    assert [len(found.flows), sum(flow.bytes for flow in found.flows)] == [2, 20]
    assert all(isinstance(track, LinkTrack) for track in found.link_rates)
    assert len(found.links) == 2


def test_memory_over_the_step(two):
    # 100 of parameters; at each time the bytes of saved tensors, 5 a microbatch, and of messages, 1 each
    first, second = (
        dict(zip(one.times.tolist(), zip(*one.moving[:2].tolist(), strict=True), strict=True)) for one in two.timelines
    )
    assert first == {0: (5, 1), 1: (10, 2), 2: (10, 2), 4: (10, 2), 6: (5, 1), 7: (5, 1), 9: (0, 0)}
    assert second == {0: (0, 2), 1: (5, 1), 2: (5, 1), 4: (5, 0), 5: (5, 0), 7: (0, 0)}
    assert two.peak_saved_bytes == (10, 5)
    assert two.peak_memory_bytes == (113, 106)


def test_run_without_memory_has_no_timelines():
    found = evolve(result_of("0F0 0B0"), has_memory=False)
    assert found.timelines == ()
    assert found.peak_memory_bytes == ()


def test_known_step_is_that_of_default_options():
    found = result_of("0F0 0B0", "1F0 1B0")
    assert found.by_default
    known = found.known_step
    assert (known.step_s, known.without_update_s, known.contended) == (6, 6, False)
    assert evolve(found, by_default=False).known_step is None


def test_step_without_the_update():
    found = result_of("0F0 0B0", costs=evolve(COSTS, optimizer_s=4))
    assert found.step_s == 7
    assert found.known_step.without_update_s == 3


def test_trace_has_every_action(two):
    assert two.trace.source == "simulated"
    found: dict[tuple[int, str], list[tuple[str, float, float, int]]] = {}
    for event in two.trace.events:
        found.setdefault((event.device, event.queue), []).append(
            (str(event.action), event.start_s, event.end_s, event.bytes)
        )
    assert found == {
        (0, "compute"): [("0F0", 0, 1, 0), ("0F1", 1, 2, 0), ("0B0", 4, 6, 0), ("0B1", 7, 9, 0), ("0STEP", 9, 9, 0)],
        (0, "send to 1"): [("0SEND_F0>1", 1, 1, 1), ("0SEND_F1>1", 2, 2, 1)],
        (0, "receive from 1"): [("0RECV_B0<1", 4, 4, 1), ("0RECV_B1<1", 7, 7, 1)],
        (1, "compute"): [("1F0", 1, 2, 0), ("1B0", 2, 4, 0), ("1F1", 4, 5, 0), ("1B1", 5, 7, 0), ("1STEP", 7, 7, 0)],
        (1, "send to 0"): [("1SEND_B0>0", 4, 4, 1), ("1SEND_B1>0", 7, 7, 1)],
        (1, "receive from 0"): [("1RECV_F0<0", 1, 1, 1), ("1RECV_F1<0", 2, 2, 1)],
    }
