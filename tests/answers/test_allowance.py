"""``--budget`` and ``--seconds`` are of all searches of an answer together."""

import pytest
from panpipe.answers.plan.allowance import Allowance


def test_searches_share_evaluations_and_what_one_leaves_goes_to_the_next():
    allowance = Allowance(100, None)
    assert allowance.share(2) == 50
    allowance.spend(30)
    assert allowance.share(1) == 70
    assert allowance.share(1, reserve=True) < 70
    allowance.spend(70)
    assert allowance.exhausted


def test_only_the_time_of_searches_counts_and_each_gets_an_equal_share_of_the_rest():
    now = iter([0.0, 4.0, 100.0, 106.0])
    allowance = Allowance(None, 10.0, clock=lambda: next(now))
    with allowance.timed(2) as seconds:
        assert seconds == 5.0
    with allowance.timed() as seconds:
        assert seconds == 6.0
    assert allowance.exhausted


def test_time_of_a_search_that_fails_counts():
    now = iter([0.0, 4.0])
    allowance = Allowance(None, 10.0, clock=lambda: next(now))
    with pytest.raises(ValueError, match="nothing fits"), allowance.timed():
        raise ValueError("nothing fits")
    assert allowance.seconds == 6.0


def test_without_budget_and_seconds_each_search_has_its_default():
    allowance = Allowance(None, None)
    with allowance.timed() as seconds:
        assert seconds is None
    allowance.spend(10)
    assert allowance.share(1) is None
    assert not allowance.exhausted
