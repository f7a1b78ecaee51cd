"""PO-H and PO-F: their building block, their orders, and the peaks of PipeOffload's table."""

import itertools

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.pipe_offload import block, po_f, po_h
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families, find_family, resident_families
from panpipe.core.schedules.scored import score


def problem(devices, microbatches, chunks, k=0.0, **more):
    """F, I and W take 1 each; ``k`` is the round trip of a stage's saved tensors ÷ these 3."""
    costs = (StageCosts(1, 1, 1, saved_bytes=1),) * (devices * chunks)
    return ScheduleProblem(devices, microbatches, chunks, costs, copy_s_per_byte=1.5 * k, **more)


def table(name, devices, microbatches, chunks):
    schedule = find_family(name).build(problem(devices, microbatches, chunks))
    return [" ".join(map(str, actions)) for actions in schedule.device_actions]


def test_block_of_four_devices_and_two_chunks():
    forward, backward = block(4, 2)
    assert forward == (0, 1, 2, 3, 9, 10, 11, 12)
    assert backward == (28, 26, 24, 22, 19, 17, 15, 13)


@pytest.mark.parametrize("devices", [1, 2, 3, 8, 13, 64])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_passes_of_a_device_never_share_a_slot(devices, chunks):
    forward, backward = block(devices, chunks)
    stages = devices * chunks
    assert all(a < b for a, b in itertools.pairwise(forward))
    assert all(a > b for a, b in itertools.pairwise(backward))
    for device in range(devices):
        own = range(device, stages, devices)
        slots = [slot % (3 * chunks) for s in own for slot in (forward[s], backward[s], backward[s] + 1)]
        assert sorted(slots) == list(range(3 * chunks))


def test_orders_are_the_block_repeated():
    assert table("po-f", 2, 3, 2) == [
        "0F0 2F0 0F1 2I0 2W0 2F1 0I0 0W0 0F2 2I1 2W1 2F2 0I1 0W1 2I2 2W2 0I2 0W2",
        "1F0 3F0 3I0 3W0 1F1 1I0 1W0 3F1 3I1 3W1 1F2 1I1 1W1 3F2 3I2 3W2 1I2 1W2",
    ]
    assert table("po-h", 4, 6, 2) == table("po-f", 4, 6, 2)


def test_half_of_the_saved_tensors_leaves_those_of_the_first_chunks():
    assert dict(po_h(problem(2, 2, 2)).offload) == {0: 1.0, 1: 1.0}
    assert dict(po_h(problem(2, 2, 3)).offload) == {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.5}
    assert dict(po_h(problem(3, 2, 1)).offload) == {0: 0.5, 1: 0.5, 2: 0.5}
    assert dict(po_f(problem(2, 2, 2)).offload) == dict.fromkeys(range(4), 1.0)


@pytest.mark.parametrize(("devices", "k"), [(4, 0.3), (8, 1.0), (16, 0.6), (32, 0.3)])
def test_po_f_holds_about_four_passes_whatever_the_depth(devices, k):
    given = problem(devices, 2 * devices, 2, k)
    schedule = po_f(given)
    found = score(given, schedule)
    assert max(found.result.peak_memory) <= 4
    # No action ends later than without copies.
    resident = score(
        given, type(schedule)(schedule.name, schedule.placement, given.microbatches, schedule.device_actions)
    )
    assert found.result.makespan <= resident.result.makespan * (1 + 1e-9)


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


@pytest.mark.parametrize(("devices", "chunks"), [(4, 2), (8, 2), (8, 4)])
def test_bubbles_are_below_those_of_1f1b(devices, chunks):
    given = problem(devices, 3 * devices, chunks, 1.0)
    work = 3 * chunks * given.microbatches
    assert score(given, po_f(given)).result.makespan - work < chunks * (devices - 1) * 3


def test_searches_without_offload_leave_them_out():
    assert {"po-h", "po-f"} == set(families()) - {family.name for family in resident_families()}
