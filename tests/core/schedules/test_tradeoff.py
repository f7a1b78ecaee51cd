"""Time against memory: what is left of all schedules is what no other one beats."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families
from panpipe.core.schedules.scored import frontier, named_schedules, peak_of


def problem(devices, microbatches, chunks, hop=0.0, limit=None):
    costs = (StageCosts(2.0, 3.0, 1.0, saved_bytes=1),) * (devices * chunks)
    return ScheduleProblem(devices, microbatches, chunks, costs, hop, limit)


@given(devices=st.integers(1, 4), microbatches=st.integers(1, 5), hop=st.sampled_from([0.0, 0.5]))
@settings(max_examples=10, deadline=None)
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
