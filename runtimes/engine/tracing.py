"""The measured trace of a step, from the records of all devices."""

import itertools
from collections.abc import Mapping, Sequence

from ...core.actions import COMM_KINDS, RECV_KINDS, SEND_KINDS, Action
from ...core.lowering.lowering import lower
from ...core.lowering.queues import queues_of
from ...core.plan.kinds import task_kinds
from ...core.plan.memory import Change, Memory, Moment
from ...core.plan.plan import Plan
from ...core.trace.trace import HOST_MEMORY, MemorySample, Trace, TraceEvent, receive_queue, send_queue
from .step_data import StepRecord


def measured_trace(plan: Plan, records: Sequence[StepRecord]) -> Trace:
    """The trace of a step.

    If the transport does not report when a transfer ran, its two ends determine it: it starts when send and receive are
    both posted, and ends when the reader has waited for it, which is the earliest time known. A reduction over replicas
    starts when all of them have issued it. On each it ends when gloo reports the end; with another transport, when it
    was waited for, which may be much later. A copy to the host or back reports its own start and end.

    Args:
        records: one for each device, replica by replica, on one monotonic clock.
    """
    origin = min(record.start_ns for record in records)
    kinds = task_kinds()
    last_issued: dict[Action, int] = {}
    for record in records:
        for action, _, issued, _, _ in record.events:
            if (declared := kinds.get(action.kind)) is not None and declared.joins_replicas:
                last_issued[action] = max(issued, last_issued.get(action, issued))
    readers = _readers(plan)
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
                start, end, where, reported = issued, returned, queue, False
                if action.kind in COMM_KINDS:
                    receive = action if action.kind in RECV_KINDS else action.counterpart
                    start = max(posted[action], posted[action.counterpart])
                    end = max(arrived.get(receive, returned), start)
                    reported = receive.counterpart in spans
                    start, end = spans.get(receive.counterpart, (start, end))
                    peer = first + plan.placement[action.counterpart.stage]
                    where = send_queue(peer) if action.kind in SEND_KINDS else receive_queue(peer)
                elif action in record.arrivals:
                    start = record.started.get(action, last_issued.get(action, issued))
                    end = max(record.arrivals[action], start)
                times = (start - origin) / 1e9, (end - origin) / 1e9
                events.append(TraceEvent(device, where, action, *times, size, reported))
            memory += [MemorySample(device, (at - origin) / 1e9, "saved", alive) for at, alive in record.memory]
            held = _host_memory(record, readers)
            memory += [MemorySample(device, (at - origin) / 1e9, HOST_MEMORY, size) for at, size in held]
    events.sort(key=lambda event: (event.start_s, event.device))
    memory.sort(key=lambda sample: sample.time_s)
    step_s = (max(record.end_ns for record in records) - origin) / 1e9
    return Trace("measured", plan.hash, plan.mesh.ranks, tuple(events), tuple(memory), step_s)


def _host_changes(action: Action) -> list[Change]:
    """The changes of the memory table that an action of a queue other than compute makes on its device's host."""
    declared = task_kinds().get(action.kind)
    changes = () if declared is None else declared.changes.get(action.kind, ())
    return [change for change in changes if change.memory is Memory.HOST]


def _readers(plan: Plan) -> dict[Action, Action]:
    """Action that changes the memory of its device's host → the compute action on the device that waits for its end."""
    queues = queues_of(plan, lower(plan))
    return {
        item.action: queues.compute[device][at]
        for task in queues.tasks
        for item in task.items
        if _host_changes(item.action)
        for device, at in task.readers
        if device == item.device
    }


def _host_memory(record: StepRecord, readers: Mapping[Action, Action]) -> list[tuple[int, int]]:
    """When the bytes of a device on its host change, and how many there are then: at the issue of an action, and at the
    start of the one that waits for it (see `TaskKind.changes`)."""
    issued = {action: at for action, _, at, _, _ in record.events}
    ends = {action: issued[reader] for action, reader in readers.items() if reader in issued}
    changes = []
    for action, _, start, _, size in record.events:
        for change in _host_changes(action):
            at = start if change.moment is Moment.START else ends.get(action, record.end_ns)
            changes.append((at, change.sign * size))
    changes.sort(key=lambda change: change[0])
    held = itertools.accumulate(size for _, size in changes)
    return [(at, size) for (at, _), size in zip(changes, held, strict=True)]
