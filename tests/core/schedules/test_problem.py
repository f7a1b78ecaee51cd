"""Problems of schedules: counts, costs, and what a stage reads."""

import pytest
from panpipe.core.actions import Kind
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleFamily, ScheduleProblem, no_parameters, source_of

COST = StageCosts(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": 0}, "devices is 0: a schedule needs at least 1"),
        ({"microbatches": -1}, "microbatches is -1"),
        ({"chunks": 0}, "chunks is 0"),
        ({"costs": [COST] * 3}, "costs of 3 stages: 2 devices with 1 chunks each have 2"),
        ({"hop_s": -0.5}, r"the delay of a hop is -0\.5"),
        ({"hop_s": float("inf")}, "the delay of a hop is inf"),
        ({"hop_s": float("nan")}, "the delay of a hop is nan"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"memory_limit": -1.0}, r"the memory limit is -1\.0: it must be at least 0"),
        ({"memory_limit": float("nan")}, "the memory limit is nan"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options, said):
    with pytest.raises(RequestError, match=said):
        ScheduleProblem(**{"devices": 2, "microbatches": 4} | options)


def test_stages_are_those_of_all_devices_and_costs_any_sequence():
    problem = ScheduleProblem(2, 4, 3, [COST] * 6, memory_limit=0.0)
    assert (problem.stages, problem.costs) == (6, (COST,) * 6)


def test_forwards_read_the_stage_before_and_gradients_the_one_after():
    assert [source_of(Kind.F, stage, 3) for stage in range(3)] == [None, 0, 1]
    assert [source_of(Kind.I, stage, 3) for stage in range(3)] == [1, 2, None]
    assert source_of(Kind.F, 0, 1) is source_of(Kind.I, 0, 1) is None


def test_family_suits_the_numbers_of_chunks_that_it_names_or_any():
    named, free = (ScheduleFamily("x", no_parameters, "", chunks=chunks) for chunks in ((1, 2), None))
    problems = [ScheduleProblem(2, 4, chunks) for chunks in (1, 2, 3)]
    assert [named.supports(problem) for problem in problems] == [True, True, False]
    assert all(free.supports(problem) for problem in problems)
    assert list(free.candidates(problems[0])) == [{}]
