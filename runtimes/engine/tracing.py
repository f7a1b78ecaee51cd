"""From what the devices of a pipeline recorded to one measured trace, and to what messages cost the devices."""

import statistics
from collections.abc import Sequence

from ...core.actions import COMM_KINDS, RECV_KINDS, SEND_KINDS, Action
from ...core.costs.message_times import MessageTimes
from ...core.plan.kinds import task_kinds
from ...core.plan.plan import Plan
from ...core.trace.trace import MemorySample, Trace, TraceEvent, receive_queue, send_queue
from .executor import StepRecord


def measured_trace(plan: Plan, records: Sequence[StepRecord]) -> Trace:
    """The trace of a step.

    Where the transport does not tell, a transfer is known from its two ends: it starts when send and receive are both
    posted, and it had arrived when the reader had waited for it, which is the earliest that anybody can tell.
    What ran on another queue, such as a reduction over replicas, likewise: it starts when all who take part have issued
    it, and ends for each when it was over there, as gloo reports; of another transport, when it had been waited for,
    which may be much later.

    Args:
        plan: that was run.
        records: one for each device, replica by replica, on one monotonic clock.
    """
    origin = min(record.start_ns for record in records)
    kinds = task_kinds()
    joined: dict[Action, int] = {}
    for record in records:
        for action, _, issued, _, _ in record.events:
            if (declared := kinds.get(action.kind)) is not None and declared.joins_replicas:
                joined[action] = max(issued, joined.get(action, issued))
    events, memory = [], []
    for first in range(0, len(records), plan.devices):
        replica = records[first : first + plan.devices]
        posted: dict[Action, int] = {}
        arrived: dict[Action, int] = {}
        spans: dict[Action, tuple[int, int]] = {}
        for record in replica:
            posted.update({action: start for action, _, start, _, _ in record.events if action.kind in COMM_KINDS})
            arrived.update(record.arrivals)
            spans.update(record.spans)
        for device, record in enumerate(replica, first):
            for action, queue, issued, returned, size in record.events:
                start, end, where = issued, returned, queue
                if action.kind in COMM_KINDS:
                    receive = action if action.kind in RECV_KINDS else action.counterpart
                    start = max(posted[action], posted[action.counterpart])
                    end = max(arrived.get(receive, returned), start)
                    start, end = spans.get(receive.counterpart, (start, end))
                    peer = first + plan.placement[action.counterpart.stage]
                    where = send_queue(peer) if action.kind in SEND_KINDS else receive_queue(peer)
                elif action in record.arrivals:
                    start = joined.get(action, issued)
                    end = max(record.arrivals[action], start)
                events.append(TraceEvent(device, where, action, (start - origin) / 1e9, (end - origin) / 1e9, size))
            memory += [MemorySample(device, (at - origin) / 1e9, "saved", alive) for at, alive in record.memory]
    events.sort(key=lambda event: (event.start_s, event.device))
    memory.sort(key=lambda sample: sample.time_s)
    step_s = (max(record.end_ns for record in records) - origin) / 1e9
    return Trace("measured", plan.hash, plan.mesh.ranks, tuple(events), tuple(memory), step_s)


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
