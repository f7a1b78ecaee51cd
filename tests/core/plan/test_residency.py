"""Memory of a device by hand, rule by rule, and the laws of every timeline. Times come from the simulator."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.lowering.lowering import lower
from panpipe.simulators.run import simulate

from ...support.plans import orders, plan_of, plans

HOP = fully_connected(2, 10**6, 10.0, 0.5)


def changes(timeline, row):
    """(time, bytes) of one kind, once for each time at which it changed."""
    kept = {}
    for time_s, size in zip(timeline.times.tolist(), timeline.moving[row].tolist(), strict=True):
        kept[time_s] = size
    result = []
    for time_s, size in kept.items():
        if not result or result[-1][1] != size:
            result.append((time_s, size))
    return result


def two_stages(prefetch, **costs):
    cost = StageCosts(1.0, 1.0, 1.0, **costs)
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), costs=[cost] * 2, cluster=HOP)
    return simulate(plan, lowered=lower(plan, prefetch)).timelines


def test_saved_tensors_are_held_from_the_start_of_f_to_the_end_of_b():
    first, second = two_stages(2, saved_bytes=100)
    assert changes(first, 0) == [(0.0, 100.0), (9.0, 0.0)]
    assert changes(second, 0) == [(0.0, 0.0), (2.5, 100.0), (5.5, 0.0)]


def test_buffers_of_sends_and_receives_are_held():
    first, second = two_stages(0)
    # Device 0: sends 1–2.5; posts its receive after 0F0, at 1, and holds it until 0B0 ends.
    assert changes(first, 1) == [(0.0, 0.0), (1.0, 20.0), (2.5, 10.0), (9.0, 0.0)]
    # Device 1: posts at 0, holds it until 1F0 starts; sends from 5.5 until it has arrived at 7.
    assert changes(second, 1) == [(0.0, 10.0), (2.5, 0.0), (5.5, 10.0), (7.0, 0.0)]


def test_i_frees_and_creates_and_w_frees_the_rest():
    cost = StageCosts(1.0, 2.0, 4.0, saved_bytes=100, freed_by_input_bytes=60, created_by_input_bytes=25)
    plan = plan_of(orders("0F0 0I0 0W0"), (0,), costs=[cost])
    assert changes(simulate(plan).timelines[0], 0) == [(0.0, 100.0), (3.0, 65.0), (7.0, 0.0)]


def test_recomputing_stage_holds_its_inputs_until_recompute():
    cost = StageCosts(1.0, 2.0, 4.0, saved_bytes=100, freed_by_input_bytes=60, input_bytes=30, recompute_s=0.5)
    plan = plan_of(orders("0F0 0F1 0B0 0I1 0W1"), (0,), costs=[cost], recompute=(0,))
    result = simulate(plan)
    assert changes(result.timelines[0], 0) == [
        (0.0, 30.0), (1.0, 60.0), (2.0, 130.0), (8.5, 130.0 - 100 + 70), (11.0, 40.0), (15.0, 0.0)
    ]  # fmt: skip
    assert result.busy_s == (15.0,)
    assert [str(event.action) for event in result.trace.events][2:4] == ["0RECOMPUTE0", "0B0"]


def test_a_tensor_that_stays_on_its_device_is_held_until_it_is_read():
    cost = StageCosts(1.0, 2.0, 4.0)
    plan = plan_of(orders("0F0 0F1 1F0 1F1 1I0 1W0 0B0 1B1 0B1"), (0, 0), costs=[cost] * 2)
    assert changes(simulate(plan).timelines[0], 1) == [
        (0.0, 0.0), (1.0, 10.0), (3.0, 0.0), (6.0, 10.0), (16.0, 0.0), (22.0, 10.0), (28.0, 0.0)
    ]  # fmt: skip


def test_peaks_have_the_action_that_causes_them():
    cost = StageCosts(1.0, 1.0, 1.0, parameter_bytes=3, gradient_bytes=5, optimizer_bytes=8, saved_bytes=100)
    plan = plan_of(orders("0F0 0F1 0B0 0B1"), (0,), costs=[attrs.evolve(cost, workspace_bytes=7)])
    result = simulate(plan)
    assert result.peak_memory_bytes == (16 + 200 + 7,)
    assert result.peak_saved_bytes == (200,)
    assert str(result.peak_actions[0]) == "0F1"
    assert result.peak_by_kind == (
        {"parameters": 3, "gradients": 5, "optimizer": 8, "saved": 200, "communication": 0, "workspace": 7},
    )


@given(plans(), st.booleans())
def test_memory_is_never_negative_and_returns_to_its_base(plan, eager):
    result = simulate(plan, eager=eager)
    for device, timeline in enumerate(result.timelines):
        assert (timeline.moving >= 0).all()
        assert (timeline.moving[:, -1] == 0).all()
        assert (timeline.times[1:] >= timeline.times[:-1]).all()
        held = [plan.prediction.costs[stage.index].state_bytes for stage in plan.stages_on(device)]
        assert sum(timeline.state) == sum(held)
        assert timeline.peak_bytes <= sum(timeline.peak_by_kind.values()) + 1e-9
        assert sum(timeline.at_peak.values()) == pytest.approx(timeline.peak_bytes)
        assert timeline.peak_by_kind["saved"] == pytest.approx(timeline.peak_saved_bytes)
