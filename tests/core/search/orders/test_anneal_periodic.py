"""Annealing of periodic orders: memory limits, seeds, and what it improves."""

import numpy as np
import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.placement import folded_placement
from panpipe.core.search.orders.anneal_periodic import anneal_periodic
from panpipe.core.search.orders.periodic import PeriodicState, periodic_starts

from .test_periodic import makespan_and_peak, task_of


def anneal(state: PeriodicState, moves: int, seed: int = 0, temperature: float = 0.005, target: float = 0.0):
    task = state.task
    return anneal_periodic(
        seed, moves, temperature, target, task.problem.microbatches, state.group, *task.for_orders()[1:], state.ring,
        state.turns, state.orders, state.lengths, task.scratch(),
    )  # fmt: skip


@pytest.mark.parametrize("limit", [2.0, 3.0, 5.0])
def test_patterns_keep_the_memory_limit_before_and_after_annealing(limit):
    task = task_of(3, 7, 2, 0.3, limit, placement=folded_placement(3, 2))
    for state in periodic_starts(task):
        before, _ = makespan_and_peak(state)
        found, tried = anneal(state, 300)
        after, peak = makespan_and_peak(state)
        assert tried == 300
        assert found == pytest.approx(after)
        assert after <= before
        assert peak <= limit


def test_equal_seeds_give_equal_patterns_and_the_target_ends_the_search():
    first, second = (periodic_starts(task_of(3, 8, 2, 0.3, 3.0, placement=folded_placement(3, 2)))[1] for _ in "ab")
    assert anneal(first, 200) == anneal(second, 200)
    assert np.array_equal(first.orders, second.orders)
    assert anneal(first, 200, target=1e9)[1] == 0


def test_annealed_patterns_reach_what_published_blocks_do_not():
    """4 devices, 8 microbatches, half of 1F1B's memory: V-Min takes 384."""
    cost = StageCosts(5, 6, 4, saved_bytes=1)
    states = periodic_starts(task_of(4, 8, 2, 1.0, 4.0, cost, folded_placement(4, 2)))
    assert min(anneal(each, 5000)[0] for each in states) <= 360
