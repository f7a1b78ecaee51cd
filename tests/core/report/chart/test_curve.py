"""Memory curves and phases of one device, by hand."""

from panpipe.core.costs.costs import StageCosts
from panpipe.core.report.chart.curve import Phases, memory_curve, phases

from ....support.plans import orders

COST = StageCosts(1.0, 1.0, 1.0, saved_bytes=10, freed_by_input_bytes=4)


def row(text):
    return orders(text)[0]


def test_curve_rises_at_the_start_of_forwards_and_falls_at_the_end_of_backwards():
    curve = memory_curve(row("0F0 0F1 0B0 0I1 0W1"), [0, 1, 4, 6, 7], [1, 2, 6, 7, 9], [COST])
    assert curve == [(0, 10), (1, 20), (6, 10), (7, 6), (9, 0)]


def test_curve_has_each_time_once_and_no_change_that_is_none():
    curve = memory_curve(row("0F0 0B0 0F1 0B1"), [1, 2, 3, 4], [2, 3, 4, 5], [COST])
    assert curve == [(0.0, 0.0), (1, 10), (3, 10), (5, 0)]
    times = [time for time, _ in curve]
    assert times == sorted(set(times))
    assert memory_curve((), [], [], [COST]) == [(0.0, 0.0)]


def test_phases_end_warm_up_with_the_first_backward_and_begin_cool_down_with_the_last_forward():
    actions, starts, ends = row("0F0 0F1 0B0 0F2 0B1 0B2"), [0, 1, 5, 7, 8, 10], [1, 2, 7, 8, 10, 12]
    assert phases(actions, starts, ends) == Phases(0, 5, 8, 12)


def test_phases_without_a_steady_state_have_none():
    assert phases(row("0F0 0F1 0I0 0I1 0W0 0W1"), [0, 1, 5, 6, 7, 8], [1, 2, 6, 7, 8, 9]) == Phases(0, 5, 5, 9)
