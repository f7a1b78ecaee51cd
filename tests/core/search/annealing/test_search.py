"""Rounds of a search: what takes part in them, what they may spend, and what ends them."""

import pytest
from attrs import evolve
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.annealing.search import ANNEALINGS, DESCENTS, START, Round, _round, _rounds, search
from panpipe.core.search.problem.meter import Meter
from panpipe.core.search.problem.options import SearchSpace

from ....support.settings import setting_of

PLAIN = SearchSpace((find_family("gpipe"), find_family("1f1b")), anneal=False, chunks=(1, 1))
ANNEALED = evolve(PLAIN, anneal=True)


def test_rounds_are_climbs_and_where_orders_may_change_annealings():
    setting = setting_of([1.0] * 4)
    assert _rounds([setting], PLAIN) == DESCENTS
    assert _rounds([setting], ANNEALED) == (*DESCENTS, *ANNEALINGS)
    assert sum(each.share for each in (*DESCENTS, *ANNEALINGS)) == pytest.approx(1.0)
    assert [each.keep for each in ANNEALINGS] == sorted((each.keep for each in ANNEALINGS), reverse=True)


def test_rounds_of_given_stages_move_no_cuts():
    fixed = evolve(setting_of([1.0] * 4), fixed=object())
    assert _rounds([fixed], ANNEALED)[0] is START
    assert _rounds([fixed, setting_of([1.0] * 4)], ANNEALED)[0] is DESCENTS[0]


def test_search_returns_every_schedule_best_first_on_its_best_cuts():
    setting = setting_of([4.0, 1.0, 1.0, 1.0, 1.0], backward=True)
    walks, stopped = search([setting], PLAIN, Meter(1000))
    assert not stopped
    assert {walk.schedule.partition("(")[0] for walk in walks} == {"gpipe", "1f1b"}
    assert [walk.value for walk in walks] == sorted(walk.value for walk in walks)
    assert tuple(walks[0].best.cuts) == (0, 1, 5)
    assert not any(walk.annealed for walk in walks)


def test_search_spends_its_budget_and_about_no_more():
    meter = Meter(500)
    search([setting_of([1.0] * 12, backward=True, microbatches=6)], ANNEALED, meter)
    assert 450 <= meter.spent <= 520


def test_schedules_that_no_round_reaches_are_ranked_by_their_steps():
    first = evolve(DESCENTS[0], keep=1, each=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("panpipe.core.search.annealing.search.DESCENTS", (first,))
        walks, _ = search([setting_of([1.0] * 4, backward=True)], PLAIN, Meter(100))
    assert len(walks) == 2
    assert all(walk.value < float("inf") for walk in walks)


def test_search_that_is_stopped_returns_what_was_found():
    now = iter([0.0, 0.0, *[9.0] * 100])  # the second look at the clock is after the second start
    walks, stopped = search([setting_of([1.0] * 4)], PLAIN, Meter(100, seconds=1.0, clock=lambda: next(now)))
    assert stopped
    assert len(walks) == 2
    assert walks[0].step_s < float("inf")


def test_search_until_something_fits_ends_with_it():
    # GPipe holds four microbatches of 30 bytes, 1F1B two of them.
    setting = setting_of([1.0] * 6, saved=10, memory=70.0, backward=True)
    meter = Meter(100_000, until_fit=True)
    walks, stopped = search([setting], PLAIN, meter)
    assert (stopped, walks[0].excess, meter.spent) == (False, 0.0, 0)
    tight = setting_of([1.0] * 6, saved=10, memory=60.0 - 1, backward=True)
    walks, _ = search([tight], PLAIN, meter)
    assert walks[0].excess == 0
    assert tuple(walks[0].best.cuts) in {(0, 2, 6), (0, 1, 6)}
    assert meter.spent < 10_000


def test_search_goes_on_from_earlier_walks():
    setting = setting_of([4.0, 1.0, 1.0, 1.0, 1.0], backward=True)
    walks, _ = search([setting], PLAIN, Meter(1000))
    meter = Meter(300)
    continued, stopped = search([setting], ANNEALED, meter, earlier=walks)
    assert (stopped, len(continued)) == (False, len(walks))
    assert continued[0].step_s <= walks[0].step_s
    assert meter.spent <= 310


def test_round_shares_its_evaluations_and_ends_with_the_first_that_fits():
    setting = setting_of([1.0] * 40, backward=True)
    walks, _ = search([setting], PLAIN, Meter(1))
    walks += [walk.copy() for walk in walks]
    plan = Round(9, 9, 1.0, 0.0, 0.5)
    meter = Meter(1000)
    _round(walks, plan, 0, 40, meter, 0)
    assert meter.spent == 40
    _round(walks, plan, 0, 0, meter, 0)
    assert meter.spent == 44  # each is looked at
    _round(walks, plan, 0, 40, meter, 0, until_fit=True)
    assert meter.spent == 54
