"""Repeated steady states: always valid orders, and a swap of two actions in the repeated part is undone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.evaluate.reference import evaluate
from panpipe.core.schedules.construction.instance import codes_of, instance
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import score
from panpipe.core.search.orders.steady_state import repeat_steady_state


def problem_of(devices, microbatches, chunks, memory=None):
    cost = StageCosts(5, 6, 4, saved_bytes=1)
    return ScheduleProblem(devices, microbatches, chunks, [cost] * (devices * chunks), 1.0, memory_limit=memory)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", 2), ("v-half", 2), ("1f1b-v", 2)]),
    st.integers(1, 5),
    st.integers(1, 14),
    st.booleans(),
)
def test_repeated_steady_state_has_all_actions_and_keeps_the_memory_limit(family, devices, microbatches, limited):
    name, chunks = family
    free = problem_of(devices, microbatches, chunks)
    known = score(free, find_family(name).build(free))
    problem = problem_of(devices, microbatches, chunks, max(known.result.peak_memory) if limited else None)
    task = instance(problem, known.schedule.placement)
    orders, lengths = codes_of(known.schedule)
    makespan, rows, _ = repeat_steady_state(task, orders, lengths, 1000)
    if makespan == float("inf"):
        return  # too few microbatches for any
    for row, order, length in zip(rows, orders, lengths, strict=True):
        assert sorted(row[:length]) == sorted(order[:length])
    schedule = task.schedule("", rows, lengths)
    result = evaluate(schedule.device_actions, schedule.placement, problem.costs, hop_s=problem.hop_s)
    assert result.makespan == pytest.approx(makespan)
    assert not limited or max(result.peak_memory) <= problem.memory_limit


def with_one_swap(orders, lengths):
    """All orders with two neighbours swapped in the middle of device 3's."""
    for i in range(int(lengths[3]) * 2 // 5, int(lengths[3]) * 3 // 5):
        swapped = orders.copy()
        swapped[3, i], swapped[3, i + 1] = orders[3, i + 1], orders[3, i]
        yield swapped


def test_repeating_other_microbatches_undoes_a_swap_of_two_actions():
    problem = ScheduleProblem(4, 16, 1, [StageCosts(1, 1, 1, saved_bytes=1)] * 4)
    schedule = find_family("1f1b").build(problem)
    task = instance(problem, schedule.placement)
    orders, lengths = codes_of(schedule)
    before = score(problem, schedule).result.makespan
    seen = 0
    for swapped in with_one_swap(orders, lengths):
        late = task.schedule("", swapped, lengths)
        try:
            result = evaluate(late.device_actions, late.placement, problem.costs, hop_s=0.0)
        except RequestError:
            continue  # a deadlock
        if result.makespan > before:
            seen += 1
            assert repeat_steady_state(task, swapped, lengths, 1000)[0] <= before
    assert seen == 3


def test_no_more_orders_are_tried_than_allowed():
    problem = problem_of(4, 16, 2)
    schedule = find_family("zb-v").build(problem)
    task = instance(problem, schedule.placement)
    assert repeat_steady_state(task, *codes_of(schedule), 3)[2] == 3
    assert repeat_steady_state(task, *codes_of(schedule), 0)[0] == float("inf")
