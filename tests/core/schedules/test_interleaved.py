"""Interleaved 1F1B, as tables a person can read, and what it refuses."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.timing.orders import evaluate

from ...support.plans import table


def test_interleaved_1f1b_orders_equal_the_published_table():
    assert table("interleaved-1f1b", 2, 4, 2) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_interleaved_1f1b_with_a_remainder_uses_larger_groups():
    assert table("interleaved-1f1b", 2, 3, 2) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    ]


def test_interleaved_1f1b_with_a_remainder_in_a_separate_round():
    assert table("interleaved-1f1b", 2, 3, 2, rounds=2) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2",
    ]


def test_interleaved_1f1b_takes_smaller_groups_under_a_memory_limit():
    costs = (StageCosts(1, 1, 1, saved_bytes=1),) * 6
    build = find_family("interleaved-1f1b").build
    free = build(ScheduleProblem(3, 7, 2, costs))
    tight = build(ScheduleProblem(3, 7, 2, costs, memory_limit=8))
    assert (free.name, tight.name) == ("interleaved-1f1b(chunks=2,rounds=2)", "interleaved-1f1b(chunks=2,rounds=3)")
    assert max(evaluate(tight.device_actions, tight.placement, costs).peak_memory) <= 8


@pytest.mark.parametrize("rounds", [0, 3])
def test_interleaved_1f1b_refuses_rounds_that_do_not_exist(rounds):
    with pytest.raises(RequestError, match="has 1 to 2"):
        table("interleaved-1f1b", 2, 4, 2, rounds=rounds)
