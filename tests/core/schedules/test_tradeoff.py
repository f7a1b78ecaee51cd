"""Time against memory: what is left of all schedules is what no other one beats."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families
from panpipe.core.schedules.tradeoff import frontier, named_schedules, peak_of


def problem(devices, microbatches, chunks, hop=0.0, limit=None):
    costs = (StageCosts(2.0, 3.0, 1.0, saved_bytes=1),) * (devices * chunks)
    return ScheduleProblem(devices, microbatches, chunks, costs, hop, limit)


def test_tradeoff_has_every_built_in_family():
    found = [s for chunks in (1, 2) for s in named_schedules(problem(4, 6, chunks, limit=6), families().values())]
    names = {scored.schedule.name.partition("(")[0] for scored in found}
    assert names == set(families()) - {"building-block"}


@given(devices=st.integers(1, 5), microbatches=st.integers(1, 7), hop=st.sampled_from([0.0, 0.5]))
@settings(max_examples=25, deadline=None)
def test_frontier_has_the_schedules_that_no_other_dominates(devices, microbatches, hop):
    known = families().values()
    found = [s for chunks in (1, 2, 3) for s in named_schedules(problem(devices, microbatches, chunks, hop), known)]
    best = frontier(found)
    for one, other in itertools.pairwise(best):
        assert peak_of(one) < peak_of(other)
        assert one.result.makespan > other.result.makespan
    for scored in found:
        assert any(
            peak_of(kept) <= peak_of(scored) and kept.result.makespan <= scored.result.makespan * (1 + 1e-9)
            for kept in best
        )


def test_frontier_of_no_schedules_is_empty():
    assert frontier([]) == []


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_peaks_compare_between_numbers_of_chunks(chunks):
    # All of gpipe is held: as many microbatches, whatever the number of stages that a device holds.
    (found,) = named_schedules(problem(2, 5, chunks), [families()["gpipe"]])
    assert peak_of(found) == 5
