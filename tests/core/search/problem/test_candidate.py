"""Places of the search space, and the buffers of a walk."""

import numpy as np
from panpipe.core.evaluate.compiled import make_scratch, make_stage_arrays
from panpipe.core.search.problem.candidate import Candidate, make_buffers

PLACE = Candidate(
    np.array([0, 1, 0]), np.array([0, 2, 4, 6]), np.array([False, True, False]), np.zeros((2, 12), dtype=np.int64),
    np.array([12, 6]),
)  # fmt: skip


def test_copy_of_a_place_has_arrays_of_its_own():
    copy = PLACE.copy()
    for part, other in zip(PLACE, copy, strict=True):
        assert np.array_equal(part, other)
        assert not np.shares_memory(part, other)


def test_buffers_have_the_sizes_of_their_place_and_share_nothing_with_it():
    buffers = make_buffers(make_stage_arrays(3, 2), make_scratch(3, 2, 2), PLACE)
    assert [part.shape for part in (buffers.work, buffers.peaks, buffers.other_work, buffers.other_peaks)] == [(2,)] * 4
    assert (buffers.whole.shape, buffers.row.shape, buffers.found.shape) == ((3,), (12,), (24, 2))
    for name in ("lengths", "cuts", "recompute"):
        assert np.array_equal(getattr(buffers, name), getattr(PLACE, name))
        assert not np.shares_memory(getattr(buffers, name), getattr(PLACE, name))
