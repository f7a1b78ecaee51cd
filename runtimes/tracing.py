"""From what the devices of a pipeline recorded to one measured trace, and to what messages cost the devices."""

import statistics
from collections.abc import Sequence

from ..core.actions import COMM_KINDS, RECV_KINDS, SEND_KINDS, Action
from ..core.message_times import MessageTimes
from ..core.plan import Plan
from ..core.trace import MemorySample, Trace, TraceEvent
from .executor import StepRecord


def measured_trace(plan: Plan, records: Sequence[StepRecord]) -> Trace:
    """The trace of a step.

    Where the transport does not tell, a transfer is known from its two ends: it starts when send and receive are both
    posted, and it had arrived when the reader had waited for it, which is the earliest that anybody can tell.

    Args:
        plan: that was run.
        records: one for each device, on one monotonic clock.
    """
    origin = min(record.start_ns for record in records)
    posted: dict[Action, int] = {}
    arrived: dict[Action, int] = {}
    spans: dict[Action, tuple[int, int]] = {}
    for record in records:
        posted.update({action: start for action, _, start, _, _ in record.events if action.kind in COMM_KINDS})
        arrived.update(record.arrivals)
        spans.update(record.spans)
    events, memory = [], []
    for device, record in enumerate(records):
        for action, queue, issued, returned, size in record.events:
            start, end = issued, returned
            if action.kind in COMM_KINDS:
                receive = action if action.kind in RECV_KINDS else action.counterpart
                start = max(posted[action], posted[action.counterpart])
                end = max(arrived.get(receive, returned), start)
                start, end = spans.get(receive.counterpart, (start, end))
            events.append(TraceEvent(device, queue, action, (start - origin) / 1e9, (end - origin) / 1e9, size))
        memory += [MemorySample(device, (at - origin) / 1e9, "saved", alive) for at, alive in record.memory]
    events.sort(key=lambda event: (event.start_s, event.device))
    memory.sort(key=lambda sample: sample.time_s)
    step_s = (max(record.end_ns for record in records) - origin) / 1e9
    return Trace("measured", plan.hash, plan.devices, tuple(events), tuple(memory), step_s)


def message_times(records: Sequence[StepRecord]) -> MessageTimes:
    """What the calls that send and receive took, by bytes; means over the step.

    Waiting for a message is no part of it: then the device is free.

    Args:
        records: one for each device.
    """
    sent: dict[int, list[float]] = {}
    received: dict[int, list[float]] = {}
    for record in records:
        for action, _, issued, returned, size in record.events:
            if action.kind in COMM_KINDS:
                found = sent if action.kind in SEND_KINDS else received
                found.setdefault(size, []).append((returned - issued) / 1e9)
    return MessageTimes(*({size: statistics.fmean(took) for size, took in each.items()} for each in (sent, received)))
