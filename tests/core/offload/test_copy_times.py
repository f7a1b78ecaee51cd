"""When copies run: never so that compute waits, reloads as late as possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.offload.copy_times import Clock, Stay, plan_copies, waits_s

INFINITY = float("inf")


def clock(*durations):
    """Actions one directly after another."""
    ends, now = [], 0.0
    for duration in durations:
        now += duration
        ends.append(now)
    return Clock([0.0, *ends[:-1]], ends)


def stay(forward, reader, out=1.0, back=1.0):
    return Stay(forward, reader, out, back, 8.0)


EVEN = clock(*[1.0] * 12)


def positions(copies):
    return [copy and (copy.freed_at, copy.reload_after) for copy in copies]


def test_memory_is_free_after_the_copy_and_the_reload_is_as_late_as_possible():
    # F ends at 1, its copy at 2; the backward starts at 10, so the reload is issued at 9.
    assert positions(plan_copies(EVEN, [stay(0, 10)])) == [(2, 8)]


def test_slow_copies_need_a_larger_distance():
    assert positions(plan_copies(EVEN, [stay(0, 10, out=2.5, back=3.5)])) == [(4, 5)]


@pytest.mark.parametrize("reader", [1, 2])
def test_stay_shorter_than_the_round_trip_is_not_copied(reader):
    assert plan_copies(EVEN, [stay(0, reader, out=0.6, back=0.6)]) == [None]


def test_stay_that_leaves_no_action_between_the_copies_is_not_copied():
    # 2.5 s between F and B, a round trip of 2.4 s: no action would run without the bytes.
    assert plan_copies(clock(1, 1, 1.5, 1), [stay(0, 3, out=1.2, back=1.2)]) == [None]


def test_reload_runs_early_where_an_offload_would_block_it():
    # The copy out of the second F (at 9) would end at 12 and delay the reload for position 10.
    found = plan_copies(clock(*[1.0] * 20), [stay(0, 10, 1, 1), stay(8, 19, 3, 1)])
    assert found[0] is not None
    assert found[0].reload_after <= 8
    assert waits_s(clock(*[1.0] * 20), [copy for copy in found if copy]) == 0


def test_link_that_carries_half_copies_half():
    actions = [1.0] * 40
    stays = [stay(at, at + 8, out=1.9, back=1.9) for at in range(0, 30, 2)]
    found = [copy for copy in plan_copies(clock(*actions), stays) if copy]
    assert len(stays) / 3 <= len(found) < len(stays)
    assert waits_s(clock(*actions), found) <= 0.05 * 40


@given(st.data())
def test_copies_never_delay_the_order(data):
    count = data.draw(st.integers(3, 30))
    durations = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=count, max_size=count))
    time = clock(*durations)
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, count - 3), st.integers(2, 12)), max_size=10, unique_by=lambda pair: pair[0])
    )
    size = data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.5]))
    stays = [stay(forward, min(forward + length, count - 1), size, size) for forward, length in pairs]
    unique = {each.reader: each for each in stays}.values()
    copies = [copy for copy in plan_copies(time, list(unique)) if copy]
    for copy in copies:
        assert copy.forward < copy.freed_at <= copy.reload_after < copy.reader
    assert waits_s(time, copies) <= 2 * size * len(copies)
    if len(copies) <= 1:
        assert waits_s(time, copies) <= 1e-9
