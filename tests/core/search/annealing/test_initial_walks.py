"""What a search begins with: every schedule once, on cuts that fit or recomputing, and orders of its own."""

import numpy as np
import pytest
from attrs import evolve
from panpipe.core.evaluate.coding import INFINITY
from panpipe.core.schedules.registry import families, find_family
from panpipe.core.search.annealing.initial_walks import InitialWalks, problem_of
from panpipe.core.search.problem.options import SearchSpace

from ....support.settings import setting_of

TWO = SearchSpace((find_family("gpipe"), find_family("1f1b")), chunks=(1, 1))


def published(setting, space=TWO):
    return list(InitialWalks([setting], space).published())


def test_every_schedule_is_a_walk_on_even_cuts_that_was_not_valued_yet():
    walks = published(setting_of([1.0] * 6, backward=True))
    assert [walk.schedule for walk in walks] == ["gpipe", "1f1b"]
    for walk in walks:
        assert tuple(walk.best.cuts) == (0, 3, 6)
        assert (walk.excess, walk.value, walk.recomputes) == (0.0, INFINITY, False)
        assert not walk.best.recompute.any()


def test_the_same_order_of_two_families_is_one_walk():
    assert len(published(setting_of([1.0] * 6, microbatches=1))) == 1


def test_first_parameters_of_every_family_come_before_others_and_few_stages_before_many():
    space = SearchSpace(tuple(families().values()), chunks=(1, 2))
    walks = published(setting_of([1.0] * 8, backward=True), space)
    chunks = [walk.chunks for walk in walks]
    assert set(chunks) == {1, 2}
    assert chunks[:2] == [1, 1]
    names = [walk.schedule.partition("(")[0] for walk in walks]
    again = next(at for at, name in enumerate(names) if name in names[:at] and chunks[at] == chunks[names.index(name)])
    assert len(set(names[:again])) > 5  # most families are there before any has a second set of parameters


def test_stages_recompute_where_the_request_says_so():
    walks = published(setting_of([1.0] * 6), evolve(TWO, recompute=(1,)))
    assert [walk.best.recompute.tolist() for walk in walks] == [[False, True]] * 2


def test_schedule_that_holds_too_much_is_cut_to_fit():
    (walk,) = published(setting_of([1.0] * 6, saved=10, memory=50.0), evolve(TWO, families=(find_family("1f1b"),)))
    assert (tuple(walk.best.cuts), walk.excess) == ((0, 2, 6), 0.0)


def test_schedule_that_holds_too_much_comes_with_stages_that_recompute_where_they_may():
    space = evolve(TWO, families=(find_family("1f1b"),), recompute=None)
    plain, again = published(setting_of([1.0] * 6, saved=10, memory=50.0), space)
    assert not plain.best.recompute.any()
    # Stage 0 reads nothing: what recomputes it holds nothing but the one microbatch that runs.
    assert again.best.recompute.tolist() == [True, False]
    assert plain.recomputes
    assert again.recomputes
    assert again.excess == 0


def test_orders_of_its_own_are_added_where_few_published_ones_fit():
    short = setting_of([1.0] * 6, saved=10, memory=25.0, backward=True)  # one microbatch of even stages takes 30
    starts = InitialWalks([short], TWO)
    assert list(starts.list_scheduled(1000)) == []  # nothing lacks before the published ones were tried
    assert all(walk.excess > 0 for walk in starts.published())
    roomy = InitialWalks([setting_of([1.0] * 6, backward=True)], TWO)
    list(roomy.published())
    assert list(roomy.list_scheduled(1000)) == []
    fits = InitialWalks([setting_of([1.0] * 6, saved=10, memory=40.0, backward=True)], TWO)
    list(fits.published())
    own = list(fits.list_scheduled(1000))
    assert own
    assert all(walk.annealed and walk.schedule == "listed" for walk in own)
    assert list(InitialWalks([short], evolve(TWO, anneal=False)).list_scheduled(1000)) == []


@pytest.mark.parametrize(("limit", "memory"), [(1e6, 1e6), (50.0, 50.0)])
def test_problem_for_a_builder_has_the_costs_and_the_memory_of_these_stages(limit, memory):
    problem = problem_of(setting_of([1.0, 2.0, 4.0], saved=10, memory=memory), (0, 1), (0, 1, 3))
    assert [cost.forward_s for cost in problem.costs] == [1.0, 6.0]
    assert (problem.devices, problem.microbatches, problem.chunks) == (2, 4, 1)
    assert problem.memory_limit == limit
    assert np.isclose(problem.hop_s, 0.0)
