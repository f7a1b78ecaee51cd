"""Errors of durations, and their summaries by kind."""

import pytest
from panpipe.core.actions import Kind, parse_action
from panpipe.core.trace.durations import ActionError, ActionOnDevice, Pair, kind_summaries, pair


def error(action, predicted, measured, device=0):
    zero = pair(0.0, 0.0)
    return ActionError(device, parse_action(action), "compute", zero, zero, pair(predicted, measured))


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [(2.0, 1.0, 1.0), (1.0, 2.0, -0.5), (0.0, 0.0, 0.0), (1.0, 0.0, None), (0.0, 4.0, -1.0)],
)
def test_error_of_a_pair_is_relative_to_the_measured_value(predicted, measured, expected):
    assert pair(predicted, measured) == Pair(predicted, measured, expected)


def test_summaries_are_one_for_each_kind_in_the_order_of_kinds():
    found = kind_summaries([error("0B0", 3.0, 2.0), error("0F0", 1.0, 1.0), error("1F0", 1.0, 2.0, device=1)])
    assert [(one.kind, one.count) for one in found] == [(Kind.F, 2), (Kind.B, 1)]
    forward = found[0]
    assert (forward.predicted_s, forward.measured_s) == (2.0, 3.0)
    assert forward.bias == pytest.approx(2 / 3 - 1)
    assert (forward.median_error, forward.mean_error, forward.worst_error) == (0.25, 0.25, -0.5)
    assert forward.worst == ActionOnDevice(1, parse_action("1F0"))
    assert forward.worst_off_s == -1.0


def test_kind_without_a_measured_duration_has_no_errors():
    [found] = kind_summaries([error("0F0", 1.0, 0.0)])
    assert (found.bias, found.median_error, found.mean_error, found.worst_error, found.worst) == (None,) * 5
    assert kind_summaries([]) == ()
