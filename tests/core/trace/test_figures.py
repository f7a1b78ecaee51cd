"""Bubbles and peak memory of one trace, computed by hand."""

import pytest
from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.trace.compare import bubble_per_device, memory_kinds, peak_memory
from panpipe.core.trace.trace import MemorySample, Trace, TraceEvent

EVENTS = (
    TraceEvent(0, "compute", parse_action("0F0"), 0.0, 2.0),
    TraceEvent(1, "compute", parse_action("1F0"), 1.0, 3.0),
    TraceEvent(0, "compute", parse_action("0B0"), 3.0, 5.0),
    TraceEvent(0, "compute", parse_action("0STEP"), 5.0, 6.0),
)
TRACE = Trace("simulated", "plan", 2, EVENTS, (), 6.0)


def test_bubble_is_the_share_of_the_step_without_compute():
    # Device 0 computes 4 of 6 s (the optimizer step is not F, B, I or W), device 1 computes 2.
    assert bubble_per_device(TRACE) == pytest.approx((1 / 3, 2 / 3))
    assert bubble_per_device(evolve(TRACE, events=(), step_s=0.0)) == (0.0, 0.0)


def test_bytes_that_change_their_kind_count_once():
    samples = (
        MemorySample(0, 0.0, "communication", 10),
        MemorySample(0, 1.0, "saved", 10),
        MemorySample(0, 1.0, "communication", 0),
    )
    trace = evolve(TRACE, memory=samples)
    assert memory_kinds(trace) == ("saved", "communication")
    assert peak_memory(trace, memory_kinds(trace))[0] == {"saved": 10, "communication": 10, "total": 10}
