"""Who waits for whom in vain, from positions alone."""

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from panpipe.runtimes.watch.activity import Activity, QuietTime
from panpipe.runtimes.watch.positions import Position, awaited, hangs, reason_of_hang, table

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


def test_awaited_ranks_are_followed_through_others():
    positions = dict(enumerate([waits(1), waits(3, 0), works(), waits(2)]))
    assert awaited(0, positions) == [1, 3, 2]
    assert awaited(2, positions) == []


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


def test_reason_names_the_waiting_rank_its_action_and_what_the_late_one_did_last():
    assert reason_of_hang(0, {0: waits(1), 1: works()}, LIMIT) == (
        "rank 0 waited 20 s for rank 1 in step 4 at 1F0; rank 1 has been in step 3 at 0B1 for 20 s, line train.py:7 in "
        "load: see what it does there, or raise timeout_s, which is 10 s"
    )
    stopped = reason_of_hang(0, {0: waits(1), 1: works(0.2, silent=19.5)}, LIMIT)
    assert "rank 1 gave no sign of life for 19.5 s and was last seen in step 3 at 0B1" in stopped


def test_stopped_rank_that_waited_before_is_no_rank_of_another_order():
    said = reason_of_hang(0, {0: waits(1), 1: evolve(waits(0), quiet_s=0.2, silent_s=19.5)}, LIMIT)
    assert "rank 1 gave no sign of life for 19.5 s" in said
    assert said.endswith("see what it does there, or raise timeout_s, which is 10 s")


def test_reason_names_the_rank_at_the_end_of_a_chain():
    said = reason_of_hang(0, {0: waits(1), 1: waits(2), 2: works()}, LIMIT)
    assert said.startswith(
        "rank 0 waited 20 s for rank 1 in step 4 at 1F0, which waits for rank 2; rank 2 has been in step 3"
    )


def test_reason_of_different_methods_names_both():
    said = reason_of_hang(0, {0: waits(1), 1: evolve(waits(0), text="in evaluate at the results")}, LIMIT)
    assert (
        "rank 1 has waited 20 s for rank 0 in evaluate at the results: every rank of a pipeline must take the same"
        in said
    )


def test_table_has_a_line_for_each_rank():
    lines = table(
        {0: waits(1), 1: works(2.0, silent=8.0), 2: evolve(works(), left=" after step 3")}, range(4)
    ).splitlines()
    assert lines == [
        "  rank 0 (stage 1) has waited 20 s for rank 1 in step 4 at 1F0",
        "  rank 1 (stage 0) gave no sign of life for 8 s and was last seen in step 3 at 0B1, line train.py:7 in load",
        "  rank 2 (stage 0) has closed its pipeline after step 3",
        "  rank 3 has been at an unknown place for 0 s",
    ]


def test_position_is_the_same_after_json_and_another_document_each_time():
    found = works()
    assert Position.of_document(found.document(1).encode()) == found
    assert found.document(1) != found.document(2)


@pytest.mark.parametrize("document", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, json.dumps({"text": 1}).encode()])
def test_unreadable_position_is_unknown(document):
    assert Position.of_document(document).text == "at an unknown place"


def test_activity_knows_method_action_and_what_ran_before():
    activity = Activity()
    assert activity.text() == "outside of panpipe"
    with activity.inside("step 1"):
        activity.doing("0F0")
        assert activity.text() == "in step 1 at 0F0"
        with activity.waiting((1,), "the results"):
            assert (activity.on, activity.text()) == ((1,), "in step 1 at the results")
        assert (activity.on, activity.text()) == ((), "in step 1 at 0F0")
    assert activity.text() == "outside of panpipe after step 1"


def test_activity_names_the_users_line():
    assert ".py:" in Activity().line()
    assert "test_activity_names_the_users_line" in Activity().line()


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
