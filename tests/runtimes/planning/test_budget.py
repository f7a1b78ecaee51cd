"""What automatic planning may spend."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.planning.budget import Budget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_budget_without_limit_ignores_the_clock():
    clock = Clock()
    budget = Budget(ThreadTeam(2), clock=clock)
    clock.now += 1e9
    assert budget.allows("rehearsing")
    assert budget.repeats("rehearsing", 1e6, 7) == 7
    assert budget.left_s is None
    assert budget.shortened == []


def test_budget_limits_repeats_by_the_time_left_and_records_it():
    clock = Clock()
    budget = Budget(ThreadTeam(2), 10.0, clock)
    clock.now += 4
    assert budget.repeats("measuring", 0.5, 5) == 5
    assert budget.shortened == []
    assert budget.repeats("rehearsing", 2.0, 5) == 3
    assert budget.repeats("rehearsing", 100.0, 5) == 1
    clock.now += 7
    assert not budget.allows("cutting anew")
    assert budget.repeats("turns", 1.0, 4, least=0) == 0
    assert budget.shortened == ["rehearsing", "cutting anew", "turns"]
    assert budget.left_s is not None
    assert 0 < budget.left_s < 0.1


def test_least_rehearsal_may_exceed_the_default_limit_by_half_and_not_a_given_one():
    for seconds, allowed in ((None, True), (10.0, False)):
        clock, budget = Clock(), Budget.of(ThreadTeam(2), seconds)
        budget.clock = clock
        budget.restart()
        clock.now += 9
        assert budget.allows_least("rehearsing", 5.0) is allowed
        assert not budget.allows_least("rehearsing", 7.0)
        assert budget.shortened == ["rehearsing"]
    assert Budget(ThreadTeam(2)).allows_least("rehearsing", 1e9)


def test_budget_records_a_search_that_ran_out_of_time_once():
    clock = Clock()
    budget = Budget(ThreadTeam(1), 1.0, clock)
    budget.searched("the search")
    assert budget.shortened == []
    clock.now += 2
    budget.searched("the search")
    budget.searched("the search")
    assert budget.shortened == ["the search"]


def test_budget_gives_fewer_evaluations_to_larger_steps():
    budget = Budget(ThreadTeam(4))
    assert budget.cut_evaluations(8) > budget.cut_evaluations(64) >= 2000
    assert budget.order_evaluations(8) > budget.cut_evaluations(8)


def test_the_default_budget_grows_with_the_step_and_a_given_one_does_not():
    budget, given = Budget.of(ThreadTeam(1), None), Budget.of(ThreadTeam(1), 3.0)
    assert (budget.seconds, given.seconds) == (10.0, 3.0)
    for each in (budget, given):
        each.expect_step(2.5)
    assert (budget.seconds, given.seconds) == (10.0, 3.0)
    for each in (budget, given):
        each.expect_step(4.0)
    assert (budget.seconds, given.seconds) == (16.0, 3.0)


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), "10", True])
def test_budget_refuses_an_invalid_limit(seconds):
    with pytest.raises(RequestError, match=r"plan_seconds is .*: give a number of seconds above 0"):
        Budget(ThreadTeam(1), seconds)
