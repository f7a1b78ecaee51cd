"""Schedules as text charts."""

from panpipe.answers.gantt import gantt
from panpipe.core.actions import parse_action


def chart(width, rows):
    """The lines of rows of (action, start, end)."""
    actions, starts, ends = ([[each[at] for each in row] for row in rows] for at in range(3))
    makespan = max((end for row in ends for end in row), default=0.0)
    return [
        line.plain for line in gantt([[parse_action(a) for a in row] for row in actions], starts, ends, makespan, width)
    ]


def test_label_is_as_long_as_its_action_with_a_gap_and_idle_time_is_dots():
    assert chart(12, [[("0F0", 0, 1), ("0B0", 2, 3)], [("1F0", 1, 2)]]) == ["0 F0─ ····B0─ ", "1 ····F0─ ····"]


def test_label_of_a_short_action_is_its_kind():
    assert chart(4, [[("0F10", 0, 1), ("0B10", 1, 2)]]) == ["0 F─B─"]
    assert chart(8, [[("0F10", 0, 3), ("0B10", 3, 8)]]) == ["0 F10B10─ "]


def test_action_that_is_shorter_than_a_character_is_left_out():
    assert chart(4, [[("0F0", 0, 0.01), ("0F1", 0.01, 4)]]) == ["0 F1─ "]


def test_empty_schedule_is_idle():
    assert chart(3, [[], []]) == ["0 ···", "1 ···"]


def test_numbers_of_devices_are_aligned():
    lines = chart(2, [[("0F0", 0, 1)]] + [[]] * 10)
    assert lines[0].startswith(" 0 ")
    assert lines[10].startswith("10 ")
