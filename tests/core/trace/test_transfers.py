"""Summaries of messages: offsets of all, durations of those that a transport reported."""

from panpipe.core.actions import Action, Kind, parse_action
from panpipe.core.trace.compare import transfer_summaries
from panpipe.core.trace.durations import ActionError, ActionOnDevice, pair

FIRST, SECOND = Action(0, Kind.SEND_F, 0, peer=1), Action(0, Kind.SEND_F, 1, peer=1)


def message(action, start, end, reported=False):
    return ActionError(0, action, "send", pair(*start), pair(*end), pair(2.0, 1.0), reported)


def test_offsets_are_of_all_messages_and_the_worst_keeps_its_sign():
    [found] = transfer_summaries([message(FIRST, (1.0, 1.0), (3.0, 2.0)), message(SECOND, (1.0, 4.0), (5.0, 5.0))])
    assert (found.kind, found.count) == (Kind.SEND_F, 2)
    assert (found.start.median_s, found.start.worst_s) == (1.5, -3.0)
    assert found.start.worst == ActionOnDevice(0, SECOND)
    assert (found.end.median_s, found.end.worst_s) == (0.5, 1.0)
    assert found.moved is None


def test_durations_are_of_reported_messages_alone():
    [found] = transfer_summaries([message(FIRST, (1.0, 1.0), (3.0, 2.0)), message(SECOND, (1, 1), (3, 3), True)])
    assert (found.moved.count, found.moved.bias) == (1, 1.0)


def test_compute_actions_are_no_messages():
    zero = pair(0.0, 0.0)
    assert transfer_summaries([ActionError(0, parse_action("0F0"), "compute", zero, zero, zero)]) == ()
