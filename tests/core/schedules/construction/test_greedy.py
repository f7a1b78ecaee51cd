"""Greedy list scheduling by hand: one device, two devices, memory limits, and its two parameters."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.evaluate.reference import evaluate
from panpipe.core.schedules.construction.greedy import Greedy
from panpipe.core.schedules.problem import ScheduleProblem


def run(devices, count, limits, overrun=0.0, squeeze=0.0, times=(1.0, 1.0, 1.0), hop_s=0.0):
    problem = ScheduleProblem(devices, count, costs=[StageCosts(*times, saved_bytes=1)] * devices, hop_s=hop_s)
    greedy = Greedy(problem, limits)
    times = greedy.run(overrun, squeeze)
    schedule = greedy.schedule("greedy", tuple(range(devices)))
    return times, [" ".join(map(str, row)) for row in schedule.device_actions], schedule, problem


def test_greedy_runs_weights_last_unless_the_next_forward_would_not_fit():
    assert run(1, 2, [2.0])[:2] == ((6, 6), ["0F0 0I0 0F1 0I1 0W0 0W1"])
    assert run(1, 2, [1.0])[:2] == ((6, 6), ["0F0 0I0 0W0 0F1 0I1 0W1"])


def test_greedy_runs_a_weight_where_its_device_would_idle():
    assert run(2, 2, [2.0, 2.0])[:2] == ((7, 7), ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"])


def test_span_of_a_device_begins_with_its_first_action():
    # Device 0 starts at 0 and ends at 6; device 1 works from 1 to 7 with a memory of one microbatch.
    span, makespan = run(2, 2, [2.0, 1.0])[0]
    assert (span, makespan) == (8, 8)
    assert run(2, 1, [1.0, 1.0])[0] == (5, 5)


def test_overrun_allows_a_forward_that_ends_after_the_first_gradient_could_begin():
    # Device 1's first I could begin at 4; with three of four microbatches ahead device 0 reads its first at 6.
    few = run(2, 4, [4.0, 4.0], 0.0, times=(2.0, 1.0, 1.0))[1][0]
    more = run(2, 4, [4.0, 4.0], 1.0, times=(2.0, 1.0, 1.0))[1][0]
    assert few.index("0I0") < more.index("0I0")


def test_squeeze_allows_a_weight_that_is_longer_than_the_gap():
    without = run(2, 2, [2.0, 2.0], times=(1.0, 1.0, 1.5), hop_s=0.5)[1][0]
    squeezed = run(2, 2, [2.0, 2.0], 0.0, 0.4, times=(1.0, 1.0, 1.5), hop_s=0.5)[1][0]
    assert without == "0F0 0F1 0I0 0I1 0W0 0W1"
    assert squeezed == "0F0 0F1 0I0 0W0 0I1 0W1"


@pytest.mark.parametrize("limit", [1.0, 2.0, 4.0])
def test_greedy_order_keeps_its_limit_and_takes_the_time_that_it_reports(limit):
    (span, makespan), _, schedule, problem = run(4, 6, [limit] * 4, 0.5, 0.25, (1.0, 1.2, 0.7), 0.3)
    result = evaluate(schedule.device_actions, schedule.placement, problem.costs, hop_s=0.3)
    assert (result.stage_span, result.makespan) == (pytest.approx(span), pytest.approx(makespan))
    assert max(result.peak_memory) <= limit
