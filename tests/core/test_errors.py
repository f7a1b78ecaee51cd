"""Errors: exit statuses, details that other processes read, and messages of failures of any class."""

import pytest
from panpipe.core.errors import InfeasibleError, PanpipeError, RequestError, WorkerError, in_a_line, message_of


class Mute(Exception):
    def __str__(self):
        raise KeyError("no message")


@pytest.mark.parametrize(
    ("kind", "status"), [(PanpipeError, 1), (RequestError, 2), (InfeasibleError, 3), (WorkerError, 1)]
)
def test_each_class_has_its_exit_status_and_is_made_again_from_its_details(kind, status):
    error = kind("what is wrong")
    again = kind.with_details(str(error), error.details())
    assert (type(again), str(again), again.exit_status) == (kind, "what is wrong", status)


def test_lost_ranks_are_named_and_are_suspects_where_one_of_several_is_lost():
    one, some = WorkerError.stopped_answering([3], "reset"), WorkerError.stopped_answering([1, 2], "reset")
    assert (str(one), one.suspects) == ("rank 3 stopped answering: reset", ())
    assert (str(some), some.suspects) == ("one of ranks 1, 2 stopped answering: reset", (1, 2))
    assert WorkerError.with_details(str(some), some.details()).suspects == (1, 2)


def test_messages_of_failures_of_any_class_are_one_line():
    assert message_of(ValueError("two\nlines")) == "two\nlines"
    assert in_a_line(ValueError("two\n  lines")) == "ValueError: two lines"
    assert in_a_line(Mute()) == "Mute: (its message raised KeyError)"
    assert in_a_line(ValueError()) == "ValueError:"
