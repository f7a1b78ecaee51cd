"""PO-H and PO-F: their building block, their orders, and the peaks of PipeOffload's table."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.pipe_offload import block, po_f, po_h
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import score


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
