"""The axis: pixels of times, round ticks, and a width for the shortest action."""

import pytest
from panpipe.core.report.chart.layout import LABELLED, NARROW, TOP, WIDE, Axis, Layout, axis_of, layout_of
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import score


def test_times_are_in_proportion_to_pixels():
    assert [Axis(8.0, 400.0).x(time) for time in (0.0, 2.0, 8.0)] == [0.0, 100.0, 400.0]
    assert Axis(0.0, 400.0).x(3.0) == 0.0


@pytest.mark.parametrize(
    ("makespan", "width", "step", "count"),
    [
        (10.0, 900.0, 1.0, 11),
        (10.0, 450.0, 2.0, 6),
        (10.0, 200.0, 5.0, 3),
        (0.003, 900.0, 0.0005, 7),
        (1e6, 90.0, 1e6, 2),
    ],
)
def test_ticks_are_round_and_about_ninety_pixels_apart(makespan, width, step, count):
    assert Axis(makespan, width).ticks() == pytest.approx([step * number for number in range(count)])


def test_axis_without_time_has_one_tick():
    assert Axis(0.0, 900.0).ticks() == [0.0]


def scored(devices, microbatches):
    problem = ScheduleProblem(devices, microbatches)
    return score(problem, find_family("1f1b").build(problem))


def test_shortest_action_has_space_for_its_label_within_bounds():
    assert axis_of(scored(2, 2)).width == NARROW
    assert axis_of(scored(2, 40)).width == LABELLED * (39 + 2) * 3
    assert axis_of(scored(2, 400)).width == WIDE


def test_memory_chart_is_below_the_lanes_of_all_devices():
    layout = layout_of(scored(3, 2))
    assert layout.memory_top(0) > TOP + layout.gantt
    assert layout.memory_top(2) - layout.memory_top(1) == layout.memory / 3
    assert layout.height == pytest.approx(layout.memory_top(0) + layout.memory)
    assert Layout(Axis(1.0, 100.0), 6).gantt == 2 * layout.gantt
