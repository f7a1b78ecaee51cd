"""Local search on orders: the makespan that it reports is the reference's, and it improves within the limits."""

import numpy as np
import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.evaluate.reference import evaluate
from panpipe.core.schedules.construction.instance import codes_of, instance
from panpipe.core.schedules.construction.polish import improve
from panpipe.core.schedules.gis import split
from panpipe.core.schedules.problem import Schedule, ScheduleProblem
from panpipe.core.schedules.registry import find_family

COST = StageCosts(1, 1, 1, saved_bytes=1)


def problem_of(limit=None):
    return ScheduleProblem(3, 4, costs=[COST] * 3, memory_limit=limit)


def split_1f1b(problem):
    known = find_family("1f1b").build(problem)
    return Schedule("split", known.placement, 4, tuple(map(split, known.device_actions)))


@pytest.mark.parametrize("limit", [None, 3.0])
def test_search_shortens_1f1b_with_split_backwards_within_the_limit(limit):
    problem = problem_of(limit)
    task = instance(problem, (0, 1, 2))
    coded, lengths = codes_of(split_1f1b(problem))
    before = [sorted(row) for row in coded.tolist()]
    span = improve(0, 400, 0.02, *task.for_orders(), coded, lengths, task.scratch())
    assert [sorted(row) for row in coded.tolist()] == before
    result = evaluate(task.schedule("", coded, lengths).device_actions, (0, 1, 2), [COST] * 3)
    assert result.makespan == pytest.approx(span)
    assert span < 18.0
    assert limit is None or max(result.peak_memory) <= limit


def test_order_that_exceeds_a_limit_is_not_improved():
    problem = problem_of(2.0)
    task = instance(problem, (0, 1, 2))
    coded, lengths = codes_of(split_1f1b(problem))
    before = coded.copy()
    assert improve(0, 400, 0.02, *task.for_orders(), coded, lengths, task.scratch()) == np.inf
    assert np.array_equal(coded, before)
