"""Periodic orders: the pattern of a small pipeline by hand, its order, and which there are."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.evaluate.reference import evaluate
from panpipe.core.schedules.construction.instance import instance
from panpipe.core.schedules.placement import mirrored_placement
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.search.orders.periodic import PeriodicState, periodic_starts

UNIT = StageCosts(1, 1, 1, saved_bytes=1)


def task_of(devices=2, count=4, chunks=1, hop=0.0, limit=None, cost=UNIT, placement=None):
    problem = ScheduleProblem(devices, count, chunks, [cost] * (devices * chunks), hop, limit)
    return instance(problem, placement or tuple(range(devices)))


def rows(state: PeriodicState) -> list[str]:
    found = state.task.schedule("", state.orders, state.lengths)
    return [" ".join(f"{a.stage}{a.kind.value}{a.microbatch}" for a in row) for row in found.device_actions]


def makespan_and_peak(state: PeriodicState) -> tuple[float, float]:
    found, problem = state.task.schedule("", state.orders, state.lengths), state.task.problem
    result = evaluate(found.device_actions, found.placement, problem.costs, hop_s=problem.hop_s)
    return result.makespan, max(result.peak_memory)


def test_pattern_of_one_microbatch_repeats_with_warm_up_and_cool_down():
    # Due: F of stage 0 at 0 and of stage 1 at 1, I at 2 and 3, W at 3 and 4; a microbatch starts every 3 s.
    first = periodic_starts(task_of())[0]
    assert first.group == 1
    assert first.turns.tolist() == [[0, 1, 1], [1, 0, 0]]  # device 1 runs W before F of the next microbatch
    assert rows(first) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2 1F3 1I3 1W3",
    ]


def test_there_is_a_pattern_for_each_group_that_the_step_has():
    assert [each.group for each in periodic_starts(task_of(count=3))] == [1, 2, 3]
    assert [each.group for each in periodic_starts(task_of(count=9))] == [1, 2, 3, 4]


def test_limit_that_fits_whole_backwards_alone_has_no_pattern():
    cost = StageCosts(1, 1, 1, saved_bytes=1, created_by_input_bytes=1)
    assert periodic_starts(task_of(limit=1.5, cost=cost)) == []


@pytest.mark.parametrize("cost", [StageCosts(0, 0, 0, saved_bytes=1), StageCosts(1e-9, 0, 1e-9, saved_bytes=1)])
def test_delays_that_are_far_longer_than_the_work_have_patterns(cost):
    states = periodic_starts(task_of(4, 3, hop=1e3, limit=2.0, cost=cost))
    assert all(makespan_and_peak(each)[1] <= 2 for each in states)
    assert states


def test_mirrored_placement_has_a_stage_and_its_mirror_on_one_device():
    placement = mirrored_placement(3)
    assert placement == (0, 1, 2, 0, 1, 2, 2, 1, 0, 2, 1, 0)
    assert placement == placement[::-1]
