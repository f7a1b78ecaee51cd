"""Copies to the host and back by hand: lowering, queues, times, memory; what is refused; laws of random plans."""

import pytest
from attrs import evolve
from hypothesis import given
from panpipe.core.actions import Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import first_microbatches, forward_only
from panpipe.core.lowering.lowering import lower
from panpipe.core.policies.offload import planned_copies
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate

from ...support.plans import hosted, leaves, offloading_plans, orders, plan_of

COST = StageCosts(1.0, 1.0, 1.0, saved_bytes=300, input_bytes=10)
HOST = hosted(fully_connected(1, 10**6, 1.0, 0.0), 100.0)
ORDER = orders("0F0 0F1 0F2 0B0 0B1 0B2")
PLAN = plan_of(ORDER, (0,), costs=[COST], cluster=HOST, offload=[leaves(0, 200, "1: 0F2 0F2", "2: 0B0 0B0")])
LOWERED = "0F0 0F1 0OFFLOAD1 0F2 0RELOAD1 0OFFLOAD2 0B0 0RELOAD2 0B1 0B2 0STEP"
TWO_QUEUES = evolve(PLAN, memory=evolve(PLAN.memory, host_copy_queues=2))


def with_offload(*found, plan=PLAN):
    return evolve(plan, memory=evolve(plan.memory, offload=found))


def text(lowered):
    return " ".join(map(str, lowered))


def times(result, queue):
    return [(str(e.action), e.start_s, e.end_s) for e in result.trace.events if e.queue == queue]


def levels(timeline, sizes):
    """(time, bytes) after each time at which the bytes changed."""
    kept = dict(zip(timeline.times.tolist(), sizes.tolist(), strict=True))
    return [
        (t, size) for (t, size), before in zip(kept.items(), [None, *kept.values()], strict=False) if size != before
    ]


def test_copies_are_issued_after_the_actions_that_the_plan_names():
    assert text(lower(PLAN)[0]) == LOWERED
    assert [(str(c.action), str(c.after), str(c.reader)) for c in planned_copies(PLAN, 0)] == [
        ("0OFFLOAD1", "0F1", "0F2"),
        ("0RELOAD1", "0F2", "0B1"),
        ("0OFFLOAD2", "0F2", "0B0"),
        ("0RELOAD2", "0B0", "0B2"),
    ]


def test_action_that_frees_waits_for_the_copy_out_and_the_backward_for_the_copy_back():
    result = simulate(PLAN)
    assert times(result, "host copies") == [
        ("0OFFLOAD1", 2.0, 4.0), ("0RELOAD1", 5.0, 7.0), ("0OFFLOAD2", 7.0, 9.0), ("0RELOAD2", 11.0, 13.0)
    ]  # fmt: skip
    assert result.operation_times == (
        ([0.0, 1.0, 4.0, 9.0, 11.0, 13.0, 15.0], [1.0, 2.0, 5.0, 11.0, 13.0, 15.0, 15.0]),
    )
    result = simulate(TWO_QUEUES)
    assert times(result, "copies to host") == [("0OFFLOAD1", 2.0, 4.0), ("0OFFLOAD2", 5.0, 7.0)]
    assert times(result, "copies from host") == [("0RELOAD1", 5.0, 7.0), ("0RELOAD2", 9.0, 11.0)]
    assert result.step_s == 13.0


def test_memory_moves_to_the_host_and_back():
    (timeline,) = simulate(PLAN).timelines
    assert levels(timeline, timeline.moving[0]) == [
        (0.0, 300.0), (1.0, 600.0), (4.0, 700.0), (5.0, 900.0), (9.0, 700.0), (11.0, 600.0), (13.0, 300.0), (15.0, 0.0)
    ]  # fmt: skip
    assert levels(timeline, timeline.host) == [(0.0, 0.0), (2.0, 200.0), (5.0, 400.0), (11.0, 200.0), (13.0, 0.0)]


def test_device_without_a_host_cannot_offload():
    with pytest.raises(RequestError, match="reaches no hub of kind host: add one"):
        validate(plan_of(ORDER, (0,), offload=[leaves(0, 50, "1: 0F2 0F2")]))


def test_first_microbatches_keep_the_copies_that_something_runs_during():
    order = orders("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3")
    offload = leaves(0, 50, "0: 0F2 0F3", "1: 0F3 0B0", "3: 0B1 0B1")
    plan = plan_of(order, (0,), cluster=HOST, offload=[offload])
    validate(plan)
    assert first_microbatches(plan, 3).memory.offload == (leaves(0, 50, "0: 0F2 0F2", "1: 0B0 0B0"),)
    assert first_microbatches(plan, 2).memory.offload == (leaves(0, 50, "1: 0B0 0B0"),)
    assert first_microbatches(plan, 1).memory.offload == ()
    assert forward_only(plan).memory.offload == ()


@given(offloading_plans())
def test_offload_frees_all_its_memory_and_neither_raises_a_peak_nor_shortens_a_step(plan):
    result, report = simulate(plan), validate(plan)
    for timeline in result.timelines:
        assert timeline.moving[0].min() >= -1e-9
        assert timeline.host.min() >= 0
        assert timeline.host[-1] == 0
        assert timeline.moving[0, -1] == pytest.approx(0, abs=1e-9)
    assert report.peak_saved_bytes == pytest.approx(result.peak_saved_bytes)
    kept = simulate(with_offload(plan=plan))
    assert all(a <= b + 1e-9 for a, b in zip(result.peak_saved_bytes, kept.peak_saved_bytes, strict=True))
    # Where messages share links (here on their way over the host) the law is false: a copy that delays one message may
    # give others more bandwidth, and the step ends sooner.
    alone, kept_alone = (simulate(each, sharing=False) for each in (plan, kept.plan))
    assert alone.step_s >= kept_alone.step_s - 1e-9
    copies = [action for device in range(plan.devices) for action in planned_copies(plan, device)]
    moved = [e for e in result.trace.events if e.action.kind in (Kind.OFFLOAD, Kind.RELOAD)]
    assert sorted(str(copy.action) for copy in copies) == sorted(str(event.action) for event in moved)
    assert all(event.bytes == plan.offloaded_bytes[event.action.stage] for event in moved)
    for count in range(1, plan.microbatches):
        validate(first_microbatches(plan, count))
