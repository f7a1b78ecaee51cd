"""Comparisons of a predicted and a measured trace, with errors computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.actions import Kind, parse_action
from panpipe.core.trace.compare import ActionOnDevice, Pair, compare
from panpipe.core.trace.trace import MemorySample, Trace, TraceEvent


def compute(text: str, start_s: float, end_s: float, device: int = 0) -> TraceEvent:
    return TraceEvent(device, "compute", parse_action(text), start_s, end_s)


PREDICTED = Trace(
    "simulated",
    "plan",
    2,
    (
        compute("0F0", 0.0, 1.0),
        compute("0F1", 1.0, 2.0),
        compute("1F0", 1.0, 3.0, device=1),
        compute("0B0", 3.0, 5.0),
        compute("0STEP", 5.0, 6.0),
    ),
    (MemorySample(0, 0.0, "saved", 0), MemorySample(0, 1.0, "saved", 110), MemorySample(1, 0.0, "parameters", 50)),
    6.0,
)
MEASURED = Trace(
    "measured",
    "plan",
    2,
    (
        compute("0F1", 0.0, 1.0),
        compute("0F0", 1.0, 3.0),
        compute("1F0", 1.0, 3.0, device=1),
        compute("0B0", 3.0, 4.6),
        compute("1B0", 4.6, 5.0, device=1),
    ),
    (MemorySample(0, 0.5, "saved", 100), MemorySample(0, 1.0, "saved", 40)),
    5.0,
)


def test_each_action_is_compared_with_the_same_action():
    rows = {str(a.action): a for a in compare(PREDICTED, MEASURED).actions}
    assert list(rows) == ["0F0", "0F1", "1F0", "0B0"]
    assert rows["0F0"].start == Pair(0.0, 1.0, -1.0)
    assert rows["0F0"].duration == Pair(1.0, 2.0, -0.5)
    assert rows["0B0"].duration.error == pytest.approx(0.25)
    assert rows["0B0"].end == Pair(5.0, 4.6, pytest.approx(5 / 4.6 - 1))
    assert rows["0F1"].start == Pair(1.0, 0.0, None)


def test_summary_of_a_kind_has_bias_median_and_worst_error():
    forward, backward = compare(PREDICTED, MEASURED).kinds
    assert (forward.kind, forward.count) == (Kind.F, 3)
    assert (forward.predicted_s, forward.measured_s, forward.bias) == (4.0, 5.0, pytest.approx(-0.2))
    assert forward.median_error == 0.0
    assert forward.mean_error == pytest.approx(0.5 / 3)
    assert forward.worst_error == -0.5
    assert forward.worst == ActionOnDevice(0, parse_action("0F0"))
    assert (backward.kind, backward.bias) == (Kind.B, pytest.approx(0.25))


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=20), st.floats(0.1, 10))
def test_slowed_copy_of_a_trace_has_the_same_error_everywhere(spans, factor):
    def trace(scale: float) -> Trace:
        events, now = [], 0.0
        for microbatch, (gap, length) in enumerate(spans):
            events.append(compute(f"0F{microbatch}", scale * (now + gap), scale * (now + gap + length)))
            now += gap + length
        return Trace("simulated", "plan", 1, tuple(events), (), scale * now)

    result = compare(trace(factor), trace(1.0))
    assert result.order == result.only_predicted == result.only_measured == ()
    assert result.step.error == pytest.approx(factor - 1, abs=1e-6)
    assert result.kinds[0].bias == pytest.approx(factor - 1, abs=1e-6)
    assert [a.duration.error for a in result.actions] == pytest.approx([factor - 1] * len(spans), abs=1e-6)
    assert result.bubbles[0].predicted == pytest.approx(result.bubbles[0].measured, abs=1e-6)
