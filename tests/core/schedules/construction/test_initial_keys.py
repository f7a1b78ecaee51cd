"""Initial keys by hand: placements, due times of a pattern, and limits that nothing fits."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import InfeasibleError
from panpipe.core.schedules.construction.initial_keys import (
    fits_one_microbatch,
    instances_that_fit,
    patterns,
    placements,
)
from panpipe.core.schedules.construction.instance import instance
from panpipe.core.schedules.problem import ScheduleProblem

UNIT = StageCosts(1, 1, 1, saved_bytes=1)


def problem_of(devices=2, count=3, chunks=1, limit=None):
    return ScheduleProblem(devices, count, chunks, [UNIT] * (devices * chunks), 0.5, limit)


@pytest.mark.parametrize(
    ("devices", "chunks", "expected"),
    [
        (1, 2, [(0, 0)]),
        (2, 1, [(0, 1)]),
        (2, 2, [(0, 1, 0, 1), (0, 1, 1, 0)]),
        (3, 2, [(0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0), None]),
        (2, 3, [(0, 1, 0, 1, 0, 1), (0, 1, 1, 0, 0, 1)]),
    ],
)
def test_placements_that_exist_for_a_size(devices, chunks, expected):
    found = list(placements(devices, chunks))
    assert len(found) == len(expected)
    assert all(one == wanted for one, wanted in zip(found, expected, strict=True) if wanted is not None)
    assert all(sorted(each) == sorted([*range(devices)] * chunks) for each in found)


def test_first_pattern_has_every_action_due_one_period_after_the_microbatch_before():
    first = next(patterns(instance(problem_of(), (0, 1))))
    # F is due as early as it can run: after one pass and a hop of 0.5 s on the second device.
    assert first.priorities.keys[0].tolist() == [[1, 4, 7], [2.5, 5.5, 8.5]]
    # I follows the last F, on the last device first; W is due at once.
    assert first.priorities.keys[1].tolist() == [[5, 8, 11], [3.5, 6.5, 9.5]]
    assert first.priorities.keys[2].tolist() == first.priorities.keys[1].tolist()
    assert first.priorities.caps.tolist() == [3, 3]
    assert not first.fused.any()


def test_number_of_patterns_is_limited_and_they_differ():
    task = instance(problem_of(chunks=2, limit=6.0), (0, 1, 1, 0))
    every = list(patterns(task))
    some = list(patterns(task, 5))
    assert len(some) <= 5 < len(every)
    assert len({(each.priorities.keys.tobytes(), each.priorities.caps.tobytes()) for each in some}) == len(some)


def test_caps_share_the_memory_of_a_device():
    tight = next(patterns(instance(problem_of(chunks=2, limit=2.0), (0, 1, 1, 0))))
    assert tight.priorities.caps.tolist() == [1, 1, 1, 1]
    roomy = next(patterns(instance(problem_of(chunks=2, limit=100.0), (0, 1, 1, 0))))
    assert roomy.priorities.caps.tolist() == [3, 3, 3, 3]


def test_limit_that_nothing_fits_is_refused_with_the_smallest_that_would():
    small, large = problem_of(chunks=2, limit=1.5), problem_of(limit=1.0)
    assert [each.problem for each in instances_that_fit([small, large])] == [large]
    assert fits_one_microbatch(instance(large, (0, 1)))
    with pytest.raises(InfeasibleError, match=r"the memory limit is 1.5 and one microbatch on every stage.* takes 2"):
        instances_that_fit([small])
