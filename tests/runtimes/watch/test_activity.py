"""What a device does now, and how long there was no progress."""

import pytest
from panpipe.runtimes.watch import activity as module
from panpipe.runtimes.watch.activity import Activity, QuietTime


def test_text_is_the_method_with_its_action_or_where_the_user_is():
    activity = Activity()
    assert activity.text() == "outside of panpipe"
    with activity.inside("step 4"):
        assert activity.text() == "in step 4"
        activity.doing("1F0")
        assert activity.text() == "in step 4 at 1F0"
    assert activity.text() == "outside of panpipe after step 4"


def test_inner_method_returns_to_the_outer_one_also_after_an_error():
    activity = Activity()
    with activity.inside("step 4"):
        with pytest.raises(ValueError, match="bad"), activity.inside("checkpoint"):
            raise ValueError("bad")
        assert (activity.method, activity.last) == ("step 4", "checkpoint")


def test_wait_names_the_ranks_and_both_its_ends_are_progress():
    activity = Activity(what="0F0")
    with activity.waiting((1, 2), "the connection"):
        assert (activity.on, activity.text()) == ((1, 2), "outside of panpipe")
        assert (activity.what, activity.count) == ("the connection", 1)
    assert (activity.on, activity.what, activity.count) == ((), "0F0", 2)


def test_line_is_the_users_own():
    activity = Activity()
    with activity.inside("step 1"):
        assert activity.line().endswith("in test_line_is_the_users_own")
    activity.thread = -1
    assert activity.line() == ""


def test_quiet_time_counts_from_the_last_change_and_pauses_count_little(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    quiet = QuietTime(step_s=2.0)
    seen = []
    for passed, what in ((1.0, "a"), (1.0, "a"), (50.0, "a"), (1.0, "b"), (1.5, "b")):
        now[0] += passed
        seen.append(quiet.update(what))
    assert seen == [0.0, 1.0, 3.0, 0.0, 1.5]
