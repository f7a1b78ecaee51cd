"""Traces that several tests use."""

import math

from panpipe.core.actions import parse_action
from panpipe.core.trace.trace import LinkTrack, MemorySample, Trace, TraceEvent


def event(device: int, queue: str, text: str, span_s: tuple[float, float], size: float = 0) -> TraceEvent:
    return TraceEvent(device, queue, parse_action(text), *span_s, size)


def two_devices(source: str = "simulated") -> Trace:
    """One microbatch through two stages, forward and back."""
    return Trace(
        source,
        "abc123",
        2,
        (
            event(0, "compute", "0F0", (0.0, 0.1)),
            event(1, "receive from 0", "1RECV_F0<0", (0.0, 0.15), 4096),
            event(0, "send to 1", "0SEND_F0>1", (0.1, 0.15), 4096),
            event(0, "receive from 1", "0RECV_B0<1", (0.1, 0.5), 4096),
            event(1, "compute", "1F0", (0.15, 0.25)),
            event(1, "compute", "1B0", (0.25, 0.45)),
            event(1, "send to 0", "1SEND_B0>0", (0.45, 0.5), 4096),
            event(0, "compute", "0B0", (0.5, 0.7000000001)),
            event(0, "compute", "0STEP", (0.7000000001, 0.75)),
        ),
        (
            MemorySample(0, 0.0, "parameters", 1e9),
            MemorySample(0, 0.1, "saved", 2.5),
            MemorySample(1, 0.25, "saved", 7),
        ),
        0.75,
        (
            LinkTrack("gpu0", "gpu1", 1e5, (0.1, 0.15), (81920.0, 0.0)),
            LinkTrack("gpu1", "gpu0", math.inf, (), ()),
        ),
    )
