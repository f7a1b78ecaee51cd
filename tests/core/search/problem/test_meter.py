"""What a search may spend."""

import pytest
from panpipe.core.search.problem.meter import Meter, Stopped


def test_meter_counts_evaluations_and_keeps_the_best_step():
    told = []
    meter = Meter(10, progress=lambda *given: told.append(given))
    meter.spend(4, 3.0)
    meter.spend(4)
    meter.spend(4, 5.0)
    assert (meter.spent, meter.left, meter.step_s) == (12, 0, 3.0)
    assert told == [(4, 10, 3.0), (8, 10, 3.0), (10, 10, 3.0)]


def test_meter_counts_evaluations_before_it_stops_at_its_time_limit():
    now = iter([100.0, 101.0, 102.5])
    meter = Meter(10, seconds=2.0, clock=lambda: next(now))
    meter.spend(1)
    with pytest.raises(Stopped):
        meter.spend(2, 7.0)
    assert (meter.spent, meter.step_s) == (3, 7.0)


def test_parts_of_a_search_share_its_bound_and_its_end():
    now = iter([0.0, 5.0, 11.0])
    told = []
    meter = Meter(75, seconds=10.0, clock=lambda: next(now), most=100, progress=lambda *given: told.append(given))
    meter.spent = 75
    part = meter.part(300)  # its creation reads the clock once, and its time is the whole search's
    assert part.left == 25
    assert not meter.exhausted
    with pytest.raises(Stopped):
        part.spend(25)
    assert told == [(100, 100, float("inf"))]
    meter.spent += part.spent
    assert meter.exhausted
    assert Meter(75).part(300).left == 300
