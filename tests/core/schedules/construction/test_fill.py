"""W in idle time: after the last I, in gaps that are long enough, and earlier where memory is short."""

from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.construction.fill import fill_weights
from panpipe.core.schedules.problem import ScheduleProblem

from ....support.plans import orders

ONE = orders("0F0 0I0 0F1 0I1")
TWO = orders("0F0 0F1 0I0 0I1", "1F0 1I0 1F1 1I1")


def filled(rows, limits, weight_s=1.0, hop_s=0.0, **options):
    cost = StageCosts(1.0, 1.0, weight_s, saved_bytes=1)
    problem = ScheduleProblem(len(rows), 2, costs=[cost] * len(rows), hop_s=hop_s)
    found = fill_weights(problem, range(len(rows)), rows, limits, **options)
    return [" ".join(map(str, row)) for row in found]


def test_weights_come_last_where_nothing_is_idle_and_memory_allows():
    assert filled(ONE, [2]) == ["0F0 0I0 0F1 0I1 0W0 0W1"]


def test_weight_runs_before_a_forward_that_would_not_fit():
    assert filled(ONE, [1]) == ["0F0 0I0 0W0 0F1 0I1 0W1"]


def test_weight_fills_the_time_until_the_next_gradient_arrives():
    # Device 0 ends 0I0 at 5 and reads 1I1's gradient at 6: one second, as long as W.
    assert filled(TWO, [2, 2], hop_s=0.5) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]


def test_weight_that_is_longer_than_the_gap_waits_unless_it_may_overlap():
    assert filled(TWO, [2, 2], 1.5, 0.5)[0] == "0F0 0F1 0I0 0I1 0W0 0W1"
    assert filled(TWO, [2, 2], 1.5, 0.5, first_fits=0.6)[0] == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert filled(TWO, [2, 2], 1.5, 0.5, first_fits=0.7)[0] == "0F0 0F1 0I0 0I1 0W0 0W1"
