"""Named schedules as tables that a person can read, what they are worth, and what they refuse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import parse_action
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.schedules.pipe_offload import block, po_f, po_h
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import score
from panpipe.core.schedules.v_shaped import (
    one_f_one_b_v_slots,
    v_half,
    v_half_slots,
    v_min,
    v_min_slots,
)
from panpipe.core.schedules.zb_v import zb_v
from panpipe.core.timing.orders import evaluate

from ...support.early_gradients import early_gradients
from ...support.plans import table

# GPipe, as tables a person can read.


def test_gpipe_orders_equal_its_published_table():
    assert table("gpipe", 2, 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_gpipe_with_chunks_is_breadth_first():
    assert table("gpipe", 2, 2, 2) == ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"]


# 1F1B, as tables a person can read.


def test_1f1b_orders_equal_the_published_table():
    assert table("1f1b", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_with_fewer_microbatches_than_devices():
    assert table("1f1b", 3, 1) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


def test_1f1b_with_chunks_is_refused():
    with pytest.raises(RequestError, match="chunks is 2: 1f1b has one stage"):
        table("1f1b", 2, 4, 2)


# Interleaved 1F1B, as tables a person can read, and what it refuses.


def test_interleaved_1f1b_orders_equal_the_published_table():
    assert table("interleaved-1f1b", 2, 4, 2) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_interleaved_1f1b_with_a_remainder_uses_larger_groups():
    assert table("interleaved-1f1b", 2, 3, 2) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    ]


def test_interleaved_1f1b_with_a_remainder_in_a_separate_round():
    assert table("interleaved-1f1b", 2, 3, 2, rounds=2) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2",
    ]


def test_interleaved_1f1b_takes_smaller_groups_under_a_memory_limit():
    costs = (StageCosts(1, 1, 1, saved_bytes=1),) * 6
    build = find_family("interleaved-1f1b").build
    free = build(ScheduleProblem(3, 7, 2, costs))
    tight = build(ScheduleProblem(3, 7, 2, costs, memory_limit=8))
    assert (free.name, tight.name) == ("interleaved-1f1b(chunks=2,rounds=2)", "interleaved-1f1b(chunks=2,rounds=3)")
    assert max(evaluate(tight.device_actions, tight.placement, costs).peak_memory) <= 8


@pytest.mark.parametrize("rounds", [0, 3])
def test_interleaved_1f1b_refuses_rounds_that_do_not_exist(rounds):
    with pytest.raises(RequestError, match="has 1 to 2"):
        table("interleaved-1f1b", 2, 4, 2, rounds=rounds)


# The looped family, as tables a person can read, and what it refuses.


def test_looped_has_interleaved_1f1b_and_1f1b_and_gpipe_as_members():
    assert table("looped", 3, 6, 2) == table("interleaved-1f1b", 3, 6, 2)
    assert table("looped", 3, 6) == table("1f1b", 3, 6)
    assert table("looped", 3, 6, 2, microbatches_per_loop=6, run_ahead=[12] * 3) == table("gpipe", 3, 6, 2)


def test_looped_deadlock_across_devices_is_refused():
    with pytest.raises(RequestError, match=r"the order deadlocks: 6F2 waits for 5F2 .*5B0 waits for 6B0"):
        table("looped", 6, 12, 2, microbatches_per_loop=1, run_ahead=[20, 2, 2, 2, 2, 2])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"microbatches_per_loop": 0}, "at least 1"),
        ({"run_ahead": [3]}, "one for each of the 2 devices"),
        ({"run_ahead": [3, 0]}, "at least one forward"),
        ({"run_ahead": [4, 2]}, "run-ahead 4,2 cannot run: the order deadlocks: 3B0 waits for 3F0"),
    ],
)
def test_looped_refuses_wrong_parameters(parameters, message):
    with pytest.raises(RequestError, match=message):
        table("looped", 2, 4, 2, **parameters)


# GIS as tables a person can read, its groups, and the backwards that it splits.


def test_gis_of_two_devices_by_hand():
    # Four forwards before device 0's first backward, three before device 1's; every backward is I and then W.
    assert table("gis", 2, 4, 2) == [
        "0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3",
        "1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1F2 1I0 1W0 1F3 1I1 1W1 3F2 3I2 3W2 3F3 3I3 3W3 1I2 1W2 1I3 1W3",
    ]


def test_gis_h_has_groups_of_half_the_devices():
    assert table("gis-h", 2, 2, 2)[0] == "0F0 2F0 0F1 2I0 2W0 2F1 0I0 0W0 2I1 2W1 0I1 0W1"
    for devices, size in ((2, 1), (3, 2), (5, 3)):
        assert table("gis-h", devices, 7, 2) == table("gis", devices, 7, 2, group_size=size)


# ZB-V: its forwards and backwards as a table, W in idle time, no bubble, and what it refuses.


def test_zb_v_forwards_and_input_gradients_of_two_devices_by_hand():
    rows = [" ".join(word for word in row.split() if "W" not in word) for row in table("zb-v", 2, 3, 2)]
    assert rows == [
        "0F0 0F1 0F2 3F0 3I0 3F1 3I1 0I0 3F2 3I2 0I1 0I2",
        "1F0 2F0 1F1 2F1 2I0 1F2 1I0 2F2 2I1 1I1 2I2 1I2",
    ]


def test_zb_v_has_no_bubble_where_all_passes_take_equally_long():
    # At least 2 p microbatches; the paper's ideal case.
    for devices in (2, 3, 4):
        problem = ScheduleProblem(devices, 2 * devices, 2, [StageCosts(1, 1, 1, saved_bytes=1)] * 2 * devices)
        assert score(problem, zb_v(problem)).result.stage_span_bubble_ratio == 0


def test_zb_v_refuses_other_than_two_chunks():
    with pytest.raises(
        RequestError, match="chunks is 1: zb-v folds the model once, so each device has 2 stages; give 2"
    ):
        zb_v(ScheduleProblem(2, 4))


# The blocks of V-Min, V-Half and 1F1B-V: slots by hand, passes that never share a slot, and what is refused.


def test_slots_of_four_devices_by_hand():
    # Controllable Memory, figure 3: the forward reaches device 3 in slot 3 and comes back to device 0 in slot 7.
    assert [v_min_slots(d, 4) for d in (0, 3)] == [(0, 7, 8, 15), (3, 4, 11, 12)]
    # V-Half takes two slots a stage on the way there and one on the way back.
    assert [v_half_slots(d, 3) for d in range(3)] == [(0, 7, 8, 16), (2, 6, 10, 15), (4, 5, 12, 14)]
    assert [one_f_one_b_v_slots(d, 4) for d in (0, 3)] == [(0, 7, 8, 22), (3, 4, 14, 16)]


@pytest.mark.parametrize(("build", "name"), [(v_min, "v-min"), (v_half, "v-half")])
def test_folded_schedules_refuse_other_than_two_chunks(build, name):
    with pytest.raises(
        RequestError, match=f"chunks is 3: {name} folds the model once, so each device has 2 stages; give 2"
    ):
        build(ScheduleProblem(2, 4, 3))


# DualPipe-V as a table a person can read, next to the steps of the published implementation, and what it refuses.


def test_dualpipe_v_of_two_devices_by_hand():
    # DeepSeek's DualPipeV, rank 0: 2 × F, F F, then I W F; one main step; B F B; B with its second half split; W I; W.
    assert table("dualpipe-v", 2, 4, 2) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_dualpipe_v_omits_microbatches_that_do_not_exist():
    assert table("dualpipe-v", 2, 1, 2) == ["0F0 3F0 3I0 3W0 0B0", "1F0 2F0 2B0 1B0"]


@pytest.mark.parametrize("chunks", [1, 3])
def test_dualpipe_v_refuses_other_than_two_chunks(chunks):
    with pytest.raises(
        RequestError, match=f"chunks is {chunks}: dualpipe-v folds the model once, so each device has 2 stages"
    ):
        table("dualpipe-v", 2, 4, chunks)


# Gradients sent early: the positions of the halves, and what they are worth.


def orders(*rows):
    return tuple(tuple(parse_action(word) for word in row.split()) for row in rows)


def built(name, devices, microbatches, costs=None, chunks=1):
    return find_family(name).build(ScheduleProblem(devices, microbatches, chunks, costs))


def test_last_backwards_before_a_send_are_split():
    before = orders("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    assert early_gradients(before, (0, 1), 2) == orders("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1I1 1W1 1F2 1I2 1W2")


@given(devices=st.integers(2, 6), more=st.integers(0, 6), w=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_early_gradients_shorten_the_cool_down_by_a_w_per_hop(devices, more, w):
    costs = (StageCosts(7.0, 9.0, float(w), saved_bytes=1),) * devices
    schedule = built("1f1b", devices, devices + more, costs)
    early = early_gradients(schedule.device_actions, schedule.placement, schedule.microbatches)
    before = evaluate(schedule.device_actions, schedule.placement, costs)
    after = evaluate(early, schedule.placement, costs)
    assert after.makespan == pytest.approx(before.makespan - (devices - 1) * w)
    assert after.peak_memory == before.peak_memory


# PO-H and PO-F: their building block, their orders, and the peaks of PipeOffload's table.


def problem(devices, microbatches, chunks, k=0.0, **more):
    """F, I and W take 1 each; ``k`` is the round trip of a stage's saved tensors ÷ these 3."""
    costs = (StageCosts(1, 1, 1, saved_bytes=1),) * (devices * chunks)
    return ScheduleProblem(devices, microbatches, chunks, costs, copy_s_per_byte=1.5 * k, **more)


def test_block_of_four_devices_and_two_chunks():
    forward, backward = block(4, 2)
    assert forward == (0, 1, 2, 3, 9, 10, 11, 12)
    assert backward == (28, 26, 24, 22, 19, 17, 15, 13)


def test_half_of_the_saved_tensors_leaves_those_of_the_first_chunks():
    assert dict(po_h(problem(2, 2, 2)).offload) == {0: 1.0, 1: 1.0}
    assert dict(po_h(problem(2, 2, 3)).offload) == {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.5}
    assert dict(po_h(problem(3, 2, 1)).offload) == {0: 0.5, 1: 0.5, 2: 0.5}
    assert dict(po_f(problem(2, 2, 2)).offload) == dict.fromkeys(range(4), 1.0)


@pytest.mark.parametrize(
    ("devices", "chunks", "k", "more"), [(8, 2, 2.0, 4), (8, 4, 1.0, 2), (16, 2, 2.0, 4), (32, 2, 1.0, 2)]
)
def test_po_h_holds_what_the_papers_table_says(devices, chunks, k, more):
    given = problem(devices, 2 * devices, chunks, k)
    found = score(given, po_h(given))
    # (v + 2)/(8v) of 1F1B's d·v passes, and the passes under way to and from the host.
    assert max(found.result.peak_memory) <= (chunks + 2) / 8 * devices + more


@pytest.mark.parametrize(
    ("devices", "gis", "gis_h", "po_h", "po_h_k2", "po_f"),
    [(4, 8, 6, 4, 6, 3), (8, 16, 12, 6, 8, 4), (16, 32, 24, 10, 11, 4), (32, 64, 48, 18, 19, 4)],
)
def test_peaks_of_the_papers_table(devices, gis, gis_h, po_h, po_h_k2, po_f):
    """With two stages on each device, in passes of one stage. The table has M = 2d for GIS, 3/4 M for GIS-H, about M/4
    for PO-H and about 4 for PO-F; what PO-H holds in addition is being copied."""
    found = []
    for name, k in (("gis", 0), ("gis-h", 0), ("po-h", 1.0), ("po-h", 2.0), ("po-f", 1.0)):
        given = problem(devices, 2 * devices, 2, k)
        found.append(max(score(given, find_family(name).build(given)).result.peak_memory))
    assert found == [gis, gis_h, po_h, po_h_k2, po_f]
