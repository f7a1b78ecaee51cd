"""A time budget for the search, with a clock that the test controls."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families
from panpipe.core.search.orders import time_limit


class Clock:
    """Every search costs a second and another for each 10,000 evaluations."""

    def __init__(self, monkeypatch):
        self.now, self.searches = 100.0, []
        real = time_limit.find_schedule

        def search(problems, families, *, evaluations, seed):
            self.searches.append(evaluations)
            self.now += 1 + evaluations / 10_000
            return real(problems, families, evaluations=min(evaluations, 500), seed=seed)

        monkeypatch.setattr(time_limit, "find_schedule", search)

    def __call__(self):
        return self.now


def problems(microbatches=24):
    cost = StageCosts(10, 12, 8, saved_bytes=1)
    return [ScheduleProblem(4, microbatches, 1, (cost,) * 4, 1.0, memory_limit=2)]


@pytest.mark.parametrize("seconds", [30, 60, 200])
def test_the_last_search_fills_the_time(monkeypatch, seconds):
    clock = Clock(monkeypatch)
    time_limit.find_schedule_within(problems(), families().values(), seconds=seconds, clock=clock)
    assert tuple(clock.searches[:-1]) == time_limit.PILOTS
    assert 0.9 * seconds <= clock.now - 100 <= seconds


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, 1), (4, 2), (14, 3)])
def test_little_time_ends_with_the_result_of_small_searches(monkeypatch, seconds, expected):
    clock = Clock(monkeypatch)
    found = time_limit.find_schedule_within(problems(), families().values(), seconds=seconds, clock=clock)
    assert tuple(clock.searches) == time_limit.PILOTS[:expected]
    assert found.result.makespan > 0


def test_search_ends_if_a_schedule_is_proved_optimal(monkeypatch):
    clock = Clock(monkeypatch)
    found = time_limit.find_schedule_within(problems(2), families().values(), seconds=1000, clock=clock)
    assert found.gap == 0
    assert clock.searches == [time_limit.PILOTS[0]]


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_time_of_zero_or_less_is_refused(seconds):
    with pytest.raises(RequestError, match="the time limit of a search is"):
        time_limit.find_schedule_within(problems(), families().values(), seconds=seconds)
