"""Moves of cuts, and walks with one kind of move."""

import itertools

import numpy as np
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.annealing.moves import MoveShares, shift_cuts
from panpipe.core.search.annealing.walk import start_walk
from panpipe.core.search.problem.meter import Meter

from ....support.settings import setting_of


def test_shift_cuts_keeps_both_ends_and_leaves_no_stage_empty():
    cuts = np.array([0, 1, 5, 6, 12])
    seen = set()
    for _ in range(300):
        before = cuts.copy()
        changed = shift_cuts(cuts, 1.5, 0.4)
        assert changed == bool((cuts != before).any())
        assert (cuts[0], cuts[-1]) == (0, 12)
        assert all(a < b for a, b in itertools.pairwise(cuts.tolist()))
        seen.add(tuple(cuts.tolist()))
    assert len(seen) > 20


def test_walk_with_only_moves_of_cuts_keeps_the_order():
    schedule = find_family("1f1b").build(ScheduleProblem(2, 4))
    walk = start_walk(setting_of([4.0, 1.0, 1.0, 1.0, 1.0], backward=True), schedule, (0, 3, 5), split=False)
    walk.evaluate()
    before = walk.step_s
    walk.anneal(Meter(2000), 2000, 1, 0.0, MoveShares(1.0))
    assert walk.step_s < before
    assert tuple(walk.best.cuts) == (0, 1, 5)
    assert walk.orders() == schedule.device_actions
