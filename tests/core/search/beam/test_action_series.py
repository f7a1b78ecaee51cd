"""Series of actions and their arcs: how far actions of memory are apart, and the paths from and to each action."""

import numpy as np
import pytest
from panpipe.core.evaluate.coding import FORWARD, INPUT, WEIGHT
from panpipe.core.evaluate.compiled import make_stage_arrays
from panpipe.core.search.annealing.packing import one_by_one
from panpipe.core.search.beam.action_series import arcs_of, raise_heads, series_of, tails_of_series

from ....support.settings import setting_of

STAGES = 3


def series_and_arcs(memory):
    """Of three stages with times 1, 2 and 3, of which a microbatch holds 10 bytes each; the middle one is alone."""
    setting = setting_of([1.0, 2.0, 3.0], backward=True, saved=10, memory=memory)
    best = one_by_one(setting, np.array([0, 1, 0]), np.arange(1, 3)).best
    costs = make_stage_arrays(STAGES, setting.edges(STAGES))
    setting.fill(best, costs)
    series = series_of(4, best.placement, costs, np.array(setting.limits))
    return series, arcs_of(4, best.placement, costs, series.room)


def memory_arcs(arcs):
    """(source, reader, k) of the arcs into F from backwards."""
    readers = np.repeat(np.arange(3 * STAGES), np.diff(arcs.first))
    rows = zip(arcs.source.tolist(), readers.tolist(), arcs.apart.tolist(), strict=True)
    return {row for row in rows if row[1] < STAGES <= row[0]}


def test_arcs_of_memory_are_as_far_apart_as_microbatches_fit():
    # Device 0 holds 20 bytes of a microbatch from F to I of the last stage. So 50 bytes are two of them.
    back, weight = INPUT * STAGES, WEIGHT * STAGES
    assert memory_arcs(series_and_arcs(1000.0)[1]) == set()
    assert memory_arcs(series_and_arcs(50.0)[1]) == {(back + 2, 2, 2)}
    assert memory_arcs(series_and_arcs(20.0)[1]) == {
        (back, 0, 2), (weight, 0, 2), (back + 1, 1, 2), (weight + 1, 1, 2), (back + 2, 2, 1), (weight + 2, 2, 2)
    }  # fmt: skip


def test_only_forwards_where_memory_is_short_do_harm():
    assert series_and_arcs(1000.0)[0].harmless.all()
    assert series_and_arcs(50.0)[0].harmless.tolist() == [False, True, False, *[True] * 6]


def test_heads_and_tails_are_the_longest_paths():
    series, arcs = series_and_arcs(1000.0)
    tails, heads = tails_of_series(2, series, arcs), np.zeros((3 * STAGES, 2))
    raise_heads(2, np.zeros(3 * STAGES, dtype=np.int64), heads, *arcs)
    # F 1 + 2 + 3, then I 3 + 2 + 1, then W of the first stage.
    assert tails[FORWARD * STAGES, 1] == pytest.approx(6 + 6 + 1)
    assert heads[INPUT * STAGES, 0] == pytest.approx(6 + 5)
    assert heads[WEIGHT * STAGES, 1] == pytest.approx(6 + 3 + 6)  # one microbatch later on the slowest stage


def test_starts_of_actions_that_have_begun_are_kept():
    _, arcs = series_and_arcs(1000.0)
    begun, heads = np.zeros(3 * STAGES, dtype=np.int64), np.zeros((3 * STAGES, 2))
    begun[0], heads[0, 0] = 1, 5.0
    raise_heads(2, begun, heads, *arcs)
    assert heads[0].tolist() == [5.0, 6.0]
    assert heads[1].tolist() == [6.0, 8.0]
