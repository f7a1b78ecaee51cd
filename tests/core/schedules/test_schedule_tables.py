"""Schedules as tables a person can read, and what each family refuses."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.evaluate.reference import evaluate
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family


def table(name, devices, microbatches, chunks=1, **parameters):
    schedule = find_family(name).build(ScheduleProblem(devices, microbatches, chunks), **parameters)
    return [" ".join(map(str, actions)) for actions in schedule.device_actions]


def test_gpipe_table():
    assert table("gpipe", 2, 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_gpipe_with_chunks_is_breadth_first():
    assert table("gpipe", 2, 2, 2) == ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"]


def test_1f1b_table():
    assert table("1f1b", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_with_fewer_microbatches_than_devices():
    assert table("1f1b", 3, 1) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


def test_interleaved_1f1b_table():
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


def test_interleaved_1f1b_with_one_chunk_is_1f1b():
    assert table("interleaved-1f1b", 4, 6) == table("1f1b", 4, 6)


def test_interleaved_1f1b_takes_smaller_groups_under_a_memory_limit():
    costs = (StageCosts(1, 1, 1, saved_bytes=1),) * 6
    build = find_family("interleaved-1f1b").build
    free = build(ScheduleProblem(3, 7, 2, costs))
    tight = build(ScheduleProblem(3, 7, 2, costs, memory_limit=8))
    assert (free.name, tight.name) == ("interleaved-1f1b(chunks=2,rounds=2)", "interleaved-1f1b(chunks=2,rounds=3)")
    assert max(evaluate(tight.device_actions, tight.placement, costs).peak_memory) <= 8


def test_looped_has_interleaved_1f1b_and_1f1b_and_gpipe_as_members():
    assert table("looped", 3, 6, 2) == table("interleaved-1f1b", 3, 6, 2)
    assert table("looped", 3, 6) == table("1f1b", 3, 6)
    assert table("looped", 3, 6, 2, microbatches_per_loop=6, run_ahead=[12] * 3) == table("gpipe", 3, 6, 2)


def test_looped_with_a_given_run_ahead():
    assert table("looped", 2, 4, 2, microbatches_per_loop=2, run_ahead=[5, 4]) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3F1 3B0 1F2 3B1 1F3 1B0 3F2 1B1 3F3 3B2 3B3 1B2 1B3",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "parameters", "message"),
    [
        ("1f1b", (2, 4, 2), {}, "1f1b with 2 chunks"),
        ("interleaved-1f1b", (2, 4, 2), {"rounds": 3}, "take 1 to 2"),
        ("interleaved-1f1b", (2, 4, 2), {"rounds": 0}, "take 1 to 2"),
        ("looped", (2, 4, 2), {"microbatches_per_loop": 0}, "at least 1"),
        ("looped", (2, 4, 2), {"run_ahead": [3]}, "one for each of the 2 devices"),
        ("looped", (2, 4, 2), {"run_ahead": [3, 0]}, "at least one forward"),
        (
            "looped",
            (2, 4, 2),
            {"run_ahead": [4, 2]},
            "run-ahead 4,2 cannot run: deadlock: 3B0 on device 1 waits for 3F0",
        ),
    ],
)
def test_wrong_parameters_are_refused(name, arguments, parameters, message):
    with pytest.raises(RequestError, match=message):
        table(name, *arguments, **parameters)


def test_looped_deadlock_across_devices_is_refused():
    with pytest.raises(RequestError, match=r"deadlock: 6F2 on device 0 waits for 5F2, .*5B0 on device 5 waits for 6B0"):
        table("looped", 6, 12, 2, microbatches_per_loop=1, run_ahead=[20, 2, 2, 2, 2, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "devices is 0"),
        ((1, 0), "microbatches is 0"),
        ((1, 1, 0), "chunks is 0"),
        ((2, 1, 1, (StageCosts(1, 1, 1),)), "costs of 1 stages"),
        ((1, 1, 1, None, -1.0), "delay of a hop is -1.0"),
        ((1, 1, 1, None, float("nan")), "delay of a hop is nan"),
        ((1, 1, 1, None, 0.0, -1.0), "memory limit is -1.0"),
    ],
)
def test_wrong_problems_are_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        ScheduleProblem(*arguments)
