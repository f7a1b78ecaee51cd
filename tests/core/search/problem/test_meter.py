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
