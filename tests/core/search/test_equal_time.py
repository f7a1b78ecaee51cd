"""Of plans with the same step, the one that holds less."""

from attrs import evolve
from panpipe.core.schedules.registry import find_family, resident_families
from panpipe.core.search.annealing.search import search
from panpipe.core.search.confirm import least_memory_first, with_less_memory
from panpipe.core.search.problem.meter import Meter
from panpipe.core.search.problem.options import SearchSpace
from panpipe.core.tradeoff import EQUAL

from ...support.settings import setting_of

SPACE = SearchSpace(tuple(resident_families()), anneal=True, chunks=(1, 1), recompute="none")


def test_walks_of_equal_steps_are_ordered_by_memory_and_those_that_fit_come_first():
    walks, _ = search([setting_of([1.0] * 4, saved=10)], SPACE, Meter(300))
    slim, fat, unfit = (evolve(walks[0], step_s=9.0, excess=0.0, peaks=(size, 1.0)) for size in (5.0, 8.0, 1.0))
    unfit.excess = 3.0
    fat.step_s *= 1 - EQUAL / 10
    assert least_memory_first([unfit, fat, slim]) == [slim, fat, unfit]


def test_orders_of_gpipe_s_step_hold_less_where_the_step_allows_it():
    # Of two devices the second one needs no microbatch in advance: GPipe's order holds all of them for the same step.
    gpipe = SearchSpace((find_family("gpipe"),), anneal=True, chunks=(1, 1), recompute="none")
    setting = setting_of([1.0] * 2, backward=True, saved=10, microbatches=6)
    walks, _ = search([setting], gpipe, Meter(1))
    before = least_memory_first(walks)
    meter = Meter(60_000)
    found, stopped = with_less_memory(before, gpipe, meter, 0)
    assert not stopped
    assert found[0].step_s <= before[0].step_s * (1 + EQUAL)
    assert max(found[0].peaks) < max(before[0].peaks)
    assert 0 < meter.spent <= 60_000
