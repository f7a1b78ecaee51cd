"""What a place is worth, and what annealing finds from it."""

import pytest
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.annealing.anneal import ABOVE
from panpipe.core.search.annealing.moves import Ways
from panpipe.core.search.annealing.walk import start_walk
from panpipe.core.search.problem.meter import Meter

from ....support.settings import setting_of


def walk_of(cuts, **options):
    schedule = find_family("1f1b").build(ScheduleProblem(2, 4))
    return start_walk(setting_of([1.0] * 6, backward=True, **options), schedule, cuts, split=False)


def test_a_place_above_its_memory_counts_more_than_any_step_and_its_share_too_much_is_known():
    roomy, short = walk_of((0, 3, 6), saved=10), walk_of((0, 3, 6), saved=10, memory=40.0)
    for walk in (roomy, short):
        walk.judge()
    assert roomy.step_s == short.step_s == 9.0 * 5  # 4 microbatches and one on its way, 9 s each
    assert (roomy.excess, short.excess) == (0.0, 0.5)  # device 0 holds 60 bytes, device 1 30
    assert short.value > ABOVE > roomy.value > 0


def test_every_cut_finds_the_best_of_all():
    walk = walk_of((0, 1, 6))
    walk.judge()
    before = walk.step_s
    walk.try_every_cut(Meter(100))
    assert tuple(walk.best.cuts) == (0, 3, 6)
    assert walk.step_s == 45.0 < before


def test_annealing_finds_down_from_what_does_not_fit_and_is_the_same_for_a_seed():
    found = []
    for _ in range(2):
        walk = walk_of((0, 5, 6), saved=10, memory=50.0)
        walk.judge()
        assert walk.excess > 0
        walk.go(Meter(3000), 3000, 7, 0.1, Ways(0.5))
        assert walk.excess == 0
        found.append((walk.step_s, walk.orders(), tuple(walk.best.cuts)))
    assert found[0] == found[1]


@pytest.mark.parametrize("moves", [0, 1])
def test_annealing_of_no_moves_keeps_the_place(moves):
    walk = walk_of((0, 2, 6))
    walk.judge()
    before = walk.step_s, walk.orders(), tuple(walk.best.cuts)
    walk.go(Meter(10), moves, 1, 0.1, Ways(0.5))
    assert (walk.step_s, walk.orders(), tuple(walk.best.cuts)) == before
