"""Who waits for whom in vain, from positions alone."""

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from panpipe.runtimes.watch.activity import QuietTime
from panpipe.runtimes.watch.positions import Position, awaited, hangs, reason_of_hang

LIMIT = 10.0


def waits(*on, s=20.0):
    return Position("in step 4 at 1F0", (1,), on, s)


def works(s=20.0, silent=0.0):
    return Position("in step 3 at 0B1", (0,), (), s, "train.py:7 in load", silent_s=silent)


@pytest.mark.parametrize(("positions", "expected"), [
    ((waits(1), works()), True),
    ((waits(1), works(3.0)), False),  # rank 1 makes progress
    ((waits(1, s=3.0), works()), False),  # not yet
    ((works(), works()), False),  # nobody waits: a pause of all ranks
    ((waits(1), works(0.1, silent=20.0)), True),  # rank 1 is stopped
    ((waits(1), works(0.1, silent=5.0)), False),
    ((waits(1), waits(2), works(3.0)), False),  # rank 2 makes progress, for which all wait
    ((waits(1), waits(2), works()), True),
    ((waits(1), waits(0)), True),  # they run different methods
    ((waits(1), waits(0, s=3.0)), False),  # rank 1 has just made progress
    ((waits(1, 2), works(), works(3.0)), False),
    ((waits(1), evolve(works(3.0), left="")), True),
    ((waits(1, s=3.0), evolve(works(3.0), left="")), False),  # its last message may still arrive
    ((waits(1),), False),  # nothing is known of rank 1 yet
])  # fmt: skip
def test_rank_hangs_if_no_rank_that_it_waits_for_makes_progress(positions, expected):
    assert hangs(0, dict(enumerate(positions)), LIMIT) is expected


def test_others_are_not_looked_at_before_a_rank_has_waited_for_long():
    class Unread(dict):
        def get(self, rank, default=None):
            raise AssertionError(rank)  # where all of 1,000 ranks wait for all, that takes seconds

    assert not hangs(0, Unread({0: waits(1, s=3.0)}), LIMIT)


@given(st.lists(st.builds(Position, st.just("x"), on=st.lists(st.integers(0, 5), max_size=3).map(tuple),
                          quiet_s=st.floats(0, 30), silent_s=st.floats(0, 30),
                          left=st.one_of(st.none(), st.just(""))), min_size=1, max_size=6))  # fmt: skip
def test_rank_with_an_awaited_rank_in_progress_does_not_hang_and_every_reason_is_a_line(found):
    positions = dict(enumerate(found))
    for rank, position in positions.items():
        if hangs(rank, positions, LIMIT):
            assert "\n" not in reason_of_hang(rank, positions, LIMIT)
            others = [positions.get(other) for other in awaited(rank, positions)]
            if all(other not in positions or positions[other].left is None for other in position.on):
                assert all(each is not None for each in others)
                assert all(each.no_progress_s >= LIMIT or each.left is not None for each in others)


@pytest.mark.parametrize("document", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, json.dumps({"text": 1}).encode()])
def test_unreadable_position_is_unknown(document):
    assert Position.of_document(document).text == "at an unknown place"


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("panpipe.runtimes.watch.activity.time.monotonic", lambda: now[0])
    quiet = QuietTime(1.0)
    found = []
    for seconds in (0.5, 0.5, 100.0, 0.5):
        now[0] += seconds
        found.append(quiet.update("the same"))
    assert found == [0.0, 0.5, 1.5, 2.0]
    assert quiet.update("another") == 0.0
