"""Annealing of keys: better orders within the limit, equal for equal seeds, and no more orders than allowed."""

import numpy as np
import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.evaluate.reference import evaluate
from panpipe.core.schedules.construction.decode import Priorities, decode
from panpipe.core.schedules.construction.instance import instance
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.search.orders.anneal_keys import anneal_keys

COST = StageCosts(1, 1, 1, saved_bytes=1)
PROBLEM = ScheduleProblem(3, 5, costs=[COST] * 3, memory_limit=3.0)


class Search:
    """Keys that begin as GPipe's: all forwards first."""

    def __init__(self):
        self.task, count = instance(PROBLEM, (0, 1, 2)), PROBLEM.microbatches
        keys = np.zeros((3, 3, count)) + np.arange(3)[:, None, None] * 100.0 + np.arange(count)
        self.priorities = Priorities(keys, np.zeros(3), np.full(3, count))
        self.given = self.task.scheduler_input(np.zeros(3, dtype=np.bool_))

    def run(self, seed=0, evaluations=300, target=0.0):
        return anneal_keys(seed, evaluations, 0.05, target, self.given, self.priorities)

    def order(self):
        rows, lengths = np.empty((3, 15), dtype=np.int64), np.zeros(3, dtype=np.int64)
        span, _ = decode(self.given, self.priorities, rows, lengths)
        return span, self.task.schedule("", rows, lengths)


def test_keys_improve_and_give_the_order_of_the_reported_makespan():
    search = Search()
    before, _ = search.order()
    found, tried = search.run()
    after, schedule = search.order()
    assert (found, tried) == (after, 300)
    assert found < before
    result = evaluate(schedule.device_actions, (0, 1, 2), PROBLEM.costs)
    assert result.makespan <= after * (1 + 1e-9)
    assert max(result.peak_memory) <= 3.0
    assert (search.priorities.caps >= 1).all()
    assert ((search.priorities.patience >= 0) & (search.priorities.patience <= 1.5)).all()


def test_equal_seeds_give_equal_keys_and_other_seeds_others():
    first, second, other = Search(), Search(), Search()
    assert first.run(0) == second.run(0)
    other.run(1)
    assert np.array_equal(first.priorities.keys, second.priorities.keys)
    assert not np.array_equal(first.priorities.keys, other.priorities.keys)


def test_search_ends_at_its_target_and_at_its_number_of_orders():
    search = Search()
    before, _ = search.order()
    assert search.run(target=before) == (before, 1)
    assert Search().run(evaluations=7)[1] == 7
    assert Search().run(evaluations=1) == (pytest.approx(before), 1)
