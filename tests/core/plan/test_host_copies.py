"""Copies to the host and back by hand: lowering, queues, times, memory; what is refused; laws of random plans."""

import re

import pytest
from attrs import evolve
from hypothesis import given
from panpipe.core.actions import Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import first_microbatches, forward_only
from panpipe.core.lowering.lowering import lower
from panpipe.core.lowering.queues import queues_of
from panpipe.core.plan.plan import parse_plan, plan_json
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


def test_copies_of_a_device_form_one_queue_and_a_reload_waits_for_its_offload():
    found = [(t.name, t.items[0].queue, t.items[0].waits, t.readers) for t in queues_of(PLAN, lower(PLAN)).tasks]
    assert found == [
        ("0OFFLOAD1", "host copies", (), ((0, 2),)), ("0RELOAD1", "host copies", (0,), ((0, 4),)),
        ("0OFFLOAD2", "host copies", (), ((0, 3),)), ("0RELOAD2", "host copies", (2,), ((0, 5),)),
    ]  # fmt: skip
    found = [(t.name, t.order) for t in queues_of(TWO_QUEUES, lower(TWO_QUEUES)).tasks]
    out, back = ("copies to host", 0), ("copies from host", 0)
    assert found == [("0OFFLOAD1", out), ("0RELOAD1", back), ("0OFFLOAD2", out), ("0RELOAD2", back)]


def test_offload_follows_the_sends_of_its_forward():
    plan = plan_of(
        orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1), offload=[leaves(0, 50, "1: 0B0 0B0")],
    )  # fmt: skip
    assert text(lower(plan)[0]) == (
        "0RECV_B0<1 0F0 0SEND_F0>1 0RECV_B1<1 0F1 0SEND_F1>1 0OFFLOAD1 0B0 0RELOAD1 0B1 0STEP"
    )


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


def test_recompute_of_the_action_that_frees_waits_for_the_copy():
    plan = plan_of(
        orders("0F0 1F0 0F1 1B0 0B0 1F1 1B1 0B1"), (0, 0), costs=[COST] * 2, cluster=HOST, recompute=[1],
        offload=[leaves(0, 200, "0: 1B0 1B0")],
    )  # fmt: skip
    assert "1RECOMPUTE0 1B0 0RELOAD0" in text(lower(plan)[0])
    task = queues_of(plan, lower(plan)).tasks[0]
    assert queues_of(plan, lower(plan)).compute[0][task.readers[0][1]].kind is Kind.RECOMPUTE


def test_storages_and_copies_are_in_the_plan_file():
    assert parse_plan(plan_json(TWO_QUEUES), "here") == TWO_QUEUES
    assert '"host_copy_queues"' not in plan_json(PLAN)
    assert PLAN.hash != with_offload().hash
    assert '"freed_at": "0B0",' in plan_json(PLAN)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0OFFLOAD1 ", "", "device 0 issues no 0OFFLOAD1"),
        ("0RELOAD2 ", "", "device 0 issues no 0RELOAD2"),
        (
            "0OFFLOAD1",
            "0OFFLOAD1 0OFFLOAD1",
            "device 0 issues 0OFFLOAD1, which the plan's memory.offload does not have",
        ),
        (
            "0OFFLOAD1",
            "0OFFLOAD0 0OFFLOAD1",
            "device 0 issues 0OFFLOAD0, which the plan's memory.offload does not have",
        ),
        ("0F1 0OFFLOAD1", "0OFFLOAD1 0F1", "device 0 issues 0OFFLOAD1 after 0F0, and the plan after 0F1: move it"),
        ("0OFFLOAD1 0F2", "0F2 0OFFLOAD1", "device 0 issues 0OFFLOAD1 after 0F2, and the plan after 0F1: move it"),
        ("0F2 0RELOAD1", "0RELOAD1 0F2", "device 0 issues 0RELOAD1 after 0F1, and the plan after 0F2: move it"),
        ("0F0", "0RELOAD1 0F0", "device 0 issues 0RELOAD1 after nothing, and the plan after 0F2: move it"),
        ("0B2 0STEP", "0B2 0STEP 0RELOAD2", "device 0 issues 0RELOAD2, which the plan's memory.offload does not have"),
    ],
)
def test_misplaced_copy_in_a_lowered_list_is_refused(old, new, said):
    validate(PLAN, lowered=orders(LOWERED))
    with pytest.raises(RequestError, match=re.escape(said)) as refusal:
        validate(PLAN, lowered=orders(LOWERED.replace(old, new)))
    assert "\n" not in str(refusal.value)


def test_copies_issued_together_may_be_in_another_order():
    other = orders(LOWERED.replace("0RELOAD1 0OFFLOAD2", "0OFFLOAD2 0RELOAD1"))
    validate(PLAN, lowered=other)
    assert times(simulate(PLAN, lowered=other), "host copies")[1:3] == [("0OFFLOAD2", 5.0, 7.0), ("0RELOAD1", 7.0, 9.0)]


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
    alone, kept_alone = (simulate(each, sharing=False, memory=False) for each in (plan, kept.plan))
    assert alone.step_s >= kept_alone.step_s - 1e-9
    copies = [action for device in range(plan.devices) for action in planned_copies(plan, device)]
    moved = [e for e in result.trace.events if e.action.kind in (Kind.OFFLOAD, Kind.RELOAD)]
    assert sorted(str(copy.action) for copy in copies) == sorted(str(event.action) for event in moved)
    assert all(event.bytes == plan.offloaded_bytes[event.action.stage] for event in moved)
    for count in range(1, plan.microbatches):
        validate(first_microbatches(plan, count))
