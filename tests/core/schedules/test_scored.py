"""Schedules with their evaluation: gaps, limits, and the order among them."""

import pytest
from attrs import evolve
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import costs_of, exceeds, score, time_of

PROBLEM = ScheduleProblem(2, 4)


def scored(name="1f1b", problem=PROBLEM):
    return score(problem, find_family(name).build(problem))


def test_stages_cost_one_unit_of_everything_by_default():
    assert costs_of(PROBLEM) == [StageCosts(1, 1, 1, saved_bytes=1)] * 2
    given = (StageCosts(2, 2, 2),) * 2
    assert costs_of(evolve(PROBLEM, costs=given)) is given
    assert (scored().result.makespan, scored().result.peak_memory) == (15, (2, 1))


@pytest.mark.parametrize(("bound", "gap"), [(None, None), (12.0, 0.25), (15.0, 0.0), (0.0, 0.0)])
def test_gap_is_the_share_above_the_bound(bound, gap):
    assert evolve(scored(), bound=bound).gap == gap


@pytest.mark.parametrize(("limit", "over"), [(None, False), (2.0, False), (2 * (1 - 1e-10), False), (1.99, True)])
def test_limit_is_exceeded_by_more_than_rounding(limit, over):
    assert exceeds(scored(problem=evolve(PROBLEM, memory_limit=limit))) == over


def test_schedules_are_ordered_by_makespan_and_then_by_the_longest_span():
    found = scored()
    assert time_of(PROBLEM, found.schedule) == (found.result.makespan, found.result.stage_span)
    assert time_of(PROBLEM, scored("zb-h1").schedule) < time_of(PROBLEM, found.schedule)
