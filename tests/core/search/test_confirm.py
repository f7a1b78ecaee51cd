"""From a search to its result: the oracle's score decides, and what only it counts is reserved."""

import pytest
from attrs import evolve
from panpipe.core.errors import RequestError
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.confirm import confirmed
from panpipe.core.search.problem.meter import Meter
from panpipe.core.search.problem.options import SearchSpace
from panpipe.core.search.problem.oracle import longest_path
from panpipe.core.search.suggestions.infeasible import NothingFits

from ...support.settings import setting_of

SPACE = SearchSpace((find_family("gpipe"), find_family("1f1b")), anneal=False, chunks=(1, 1))


def found(oracle=longest_path, budget=500, space=SPACE, alternatives=True, **options):
    setting = setting_of([1.0] * 6, backward=True, saved=10, **options)
    meter = Meter(budget)
    return confirmed([setting], space, meter, oracle, 0, alternatives), meter


def heavier(extra):
    """The search's own oracle with further bytes on each device."""

    def oracle(plan, costs, cluster):
        score = longest_path(plan, costs, cluster)
        return evolve(score, peak_memory_bytes=tuple(peak + extra for peak in score.peak_memory_bytes))

    return oracle


def test_best_plan_has_the_oracles_prediction_and_the_evaluations_that_were_spent():
    result, meter = found()
    best = result.best
    score = longest_path(evolve(best, prediction=None), best.prediction.costs, best.prediction.cluster)
    assert (best.prediction.step_s, best.prediction.peak_memory_bytes) == (score.step_s, score.peak_memory_bytes)
    assert best.prediction.step_s == 45.0
    assert result.evaluations == meter.spent == best.prediction.evaluations
    assert not result.stopped


def test_alternatives_are_slower_and_hold_less():
    plans = found(heavier(1.0))[0].plans
    steps = [plan.prediction.step_s for plan in plans]
    peaks = [max(plan.prediction.peak_memory_bytes) for plan in plans]
    assert steps == sorted(steps)
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    assert len(found(alternatives=False)[0].plans) == 1


def test_memory_that_only_the_oracle_counts_is_reserved():
    # Even stages hold 60 bytes, which fit; with 30 bytes more the first stage has to be shorter.
    result, _ = found(heavier(30.0), memory=70.0)
    assert max(result.best.prediction.peak_memory_bytes) <= 70
    assert len(result.best.stages[0].nodes) < 3
    assert len(found(memory=70.0)[0].best.stages[0].nodes) == 3


def test_what_does_not_fit_by_the_oracle_is_refused():
    with pytest.raises(NothingFits, match="may hold 20"):
        found(memory=20.0)
    with pytest.raises(NothingFits):
        found(heavier(1000.0), memory=70.0)


def test_settings_that_no_schedule_supports_are_refused():
    with pytest.raises(RequestError, match="no schedule of '1f1b' for 2 devices with 2 stages each and 4 microbatches"):
        found(space=evolve(SPACE, chunks=(2, 2), families=(find_family("1f1b"),)))


@pytest.mark.parametrize("budget", [1, 30, 400])
def test_a_given_budget_bounds_all_parts_of_the_search(budget):
    # The oracle counts more memory than the search, so that searches with a reserve follow.
    setting = setting_of([1.0] * 6, backward=True, saved=10, memory=70.0)
    meter = Meter(max(int(0.75 * budget), 1), most=budget)
    result = confirmed([setting], SPACE, meter, heavier(10.0), 0)
    assert 1 <= result.evaluations <= budget
