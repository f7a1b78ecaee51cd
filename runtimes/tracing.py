"""From what the devices of a pipeline recorded to one measured trace."""

from collections.abc import Sequence

from ..core.actions import COMM_KINDS, RECV_KINDS, Action
from ..core.plan import Plan
from ..core.trace import MemorySample, Trace, TraceEvent
from .executor import StepRecord


def measured_trace(plan: Plan, records: Sequence[StepRecord]) -> Trace:
    """The trace of a step.

    A transfer is known from its two ends: it starts when send and receive are both posted, and it had arrived when the
    reader had waited for it, which is the earliest that anybody can tell.

    Args:
        plan: that was run.
        records: one for each device, on one monotonic clock.
    """
    origin = min(record.start_ns for record in records)
    posted: dict[Action, int] = {}
    arrived: dict[Action, int] = {}
    for record in records:
        posted.update({action: start for action, _, start, _, _ in record.events if action.kind in COMM_KINDS})
        arrived.update(record.arrivals)
    events, memory = [], []
    for device, record in enumerate(records):
        for action, queue, issued, returned, size in record.events:
            start, end = issued, returned
            if action.kind in COMM_KINDS:
                receive = action if action.kind in RECV_KINDS else action.counterpart
                start = max(posted[action], posted[action.counterpart])
                end = max(arrived.get(receive, returned), start)
            events.append(TraceEvent(device, queue, action, (start - origin) / 1e9, (end - origin) / 1e9, size))
        memory += [MemorySample(device, (at - origin) / 1e9, "saved", alive) for at, alive in record.memory]
    events.sort(key=lambda event: (event.start_s, event.device))
    memory.sort(key=lambda sample: sample.time_s)
    step_s = (max(record.end_ns for record in records) - origin) / 1e9
    return Trace("measured", plan.hash, plan.devices, tuple(events), tuple(memory), step_s)
