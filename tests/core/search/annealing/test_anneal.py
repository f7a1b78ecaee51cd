"""The evaluation of a place, and annealing from it."""

import pytest
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.annealing.anneal import ABOVE
from panpipe.core.search.annealing.moves import MoveShares
from panpipe.core.search.annealing.walk import start_walk
from panpipe.core.search.problem.meter import Meter

from ....support.settings import setting_of


def walk_of(cuts, **options):
    schedule = find_family("1f1b").build(ScheduleProblem(2, 4))
    return start_walk(setting_of([1.0] * 6, backward=True, **options), schedule, cuts, split=False)


def test_objective_of_a_place_above_its_memory_is_above_every_step_and_its_excess_is_a_share_of_the_limit():
    roomy, short = walk_of((0, 3, 6), saved=10), walk_of((0, 3, 6), saved=10, memory=40.0)
    for walk in (roomy, short):
        walk.evaluate()
    assert roomy.step_s == short.step_s == 9.0 * 5  # 4 microbatches and one on its way, 9 s each
    assert (roomy.excess, short.excess) == (0.0, 0.5)  # device 0 holds 60 bytes, device 1 30
    assert short.value > ABOVE > roomy.value > 0


def test_try_every_cut_finds_the_best_cuts():
    walk = walk_of((0, 1, 6))
    walk.evaluate()
    before = walk.step_s
    walk.try_every_cut(Meter(100))
    assert tuple(walk.best.cuts) == (0, 3, 6)
    assert walk.step_s == 45.0 < before


def test_annealing_reaches_the_memory_limit_from_above_and_gives_the_same_result_for_a_seed():
    found = []
    for _ in range(2):
        walk = walk_of((0, 5, 6), saved=10, memory=50.0)
        walk.evaluate()
        assert walk.excess > 0
        walk.anneal(Meter(3000), 3000, 7, 0.1, MoveShares(0.5))
        assert walk.excess == 0
        found.append((walk.step_s, walk.orders(), tuple(walk.best.cuts)))
    assert found[0] == found[1]


@pytest.mark.parametrize("moves", [0, 1])
def test_annealing_of_no_moves_keeps_the_place(moves):
    walk = walk_of((0, 2, 6))
    walk.evaluate()
    before = walk.step_s, walk.orders(), tuple(walk.best.cuts)
    walk.anneal(Meter(10), moves, 1, 0.1, MoveShares(0.5))
    assert (walk.step_s, walk.orders(), tuple(walk.best.cuts)) == before
