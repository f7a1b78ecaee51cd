"""Builds the trace of a simulated step, in the schema that simulator and runtimes share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from ..core.actions import Kind
from ..core.lowering.residency import Timeline
from ..core.trace.trace import (
    COMPUTE_QUEUE,
    HOST_MEMORY,
    MEMORY_KINDS,
    MemorySample,
    Trace,
    TraceEvent,
    receive_queue,
    send_queue,
)

if TYPE_CHECKING:
    from .result import SimulationResult

_LEAST_S = 1e-15
"""Seconds after the start at which what follows a peak at the start is shown."""


def build_trace(result: "SimulationResult") -> Trace:
    """The trace: events of all queues in order of start, a memory sample for every change, and the use of the links.

    Events of one queue that start at the same time stay in the order issued: the reductions are before the optimizer
    steps.
    """
    operations = list(_operations(result))
    steps = [event for event in operations if event.action.kind is Kind.STEP]
    work = [event for event in operations if event.action.kind is not Kind.STEP]
    events = [*work, *_tasks(result), *steps, *_transfers(result)]
    events.sort(key=lambda event: (event.start_s, event.device))
    changes = [
        change for device, timeline in enumerate(result.timelines) for change in _memory_changes(device, timeline)
    ]
    changes.sort(key=lambda change: (change[0].time_s, change[1]))
    samples = [sample for sample, _ in changes]
    plan = result.plan
    return Trace(
        "simulated", plan.hash, plan.mesh.ranks, tuple(events), tuple(samples), result.step_s, result.link_rates,
    )  # fmt: skip


def _operations(result: "SimulationResult") -> Iterator[TraceEvent]:
    for device, actions in enumerate(result.queues.compute):
        for action, start_s, end_s in zip(actions, *result.operation_times[device], strict=True):
            yield TraceEvent(device, COMPUTE_QUEUE, action, start_s, end_s)


def _tasks(result: "SimulationResult") -> Iterator[TraceEvent]:
    """Tasks on the compute queue occupy it from their issue, one after another, because the steps wait for them."""
    free_s: dict[int, float] = {}
    for task in result.tasks:
        if task.queue != COMPUTE_QUEUE:
            yield TraceEvent(task.device, task.queue, task.action, task.start_s, task.end_s, task.bytes)
        else:
            start_s = max(task.issued_s, free_s.get(task.device, 0.0))
            end_s = free_s[task.device] = max(start_s, task.end_s)
            yield TraceEvent(task.device, COMPUTE_QUEUE, task.action, start_s, end_s)


def _transfers(result: "SimulationResult") -> Iterator[TraceEvent]:
    for (src, dst), messages in result.queues.messages.items():
        for message, start_s, end_s in zip(messages, *result.transfer_times[src, dst], strict=True):
            yield TraceEvent(src, send_queue(dst), message.send, start_s, end_s, message.bytes)
            yield TraceEvent(dst, receive_queue(src), message.receive, start_s, end_s, message.bytes)


def _memory_changes(device: int, timeline: Timeline) -> Iterator[tuple[MemorySample, bool]]:
    """Each kind at the start, and then at each change, and whether it grows; several changes at one time give one
    sample, unless a peak is between them (`_kept_changes`). The host's memory only of a device that offloads.

    At one time the kinds that shrink are before those that grow. So a sum over the kinds that a reader updates with
    each sample is never above the peak.
    """
    kept, times = _kept_changes(timeline)
    rows = {kind: timeline.of_kind(kind)[kept] for kind in MEMORY_KINDS}
    if timeline.host.any():
        rows[HOST_MEMORY] = timeline.host[kept]
    for kind, row in rows.items():
        changed = numpy.flatnonzero(numpy.append(True, row[1:] != row[:-1]))
        sizes = row[changed]
        grows = numpy.append(True, sizes[1:] > sizes[:-1])
        for time_s, size, grown in zip(times[changed].tolist(), sizes.tolist(), grows.tolist(), strict=True):
            yield MemorySample(device, time_s, kind, size), grown


def _kept_changes(timeline: Timeline) -> tuple[NDArray[numpy.int64], NDArray[numpy.float64]]:
    """The changes of memory that a trace shows, as positions, and their times, which are all different.

    Of several changes at one time it is the last one, and before it one that reaches a peak of a kind or of all kinds
    together: memory that is allocated before other memory is freed, at the same time. What follows such a peak is later
    by so little that no other change is between them, and by so much that they differ in microseconds, too, as floats:
    readers who take the samples of one time together see the peak.
    """
    times = timeline.times
    first = numpy.flatnonzero(numpy.append(True, times[1:] != times[:-1]))
    last = numpy.append(first[1:], len(times)) - 1
    kept = set(last.tolist())
    for row in (*timeline.moving, timeline.moving.sum(axis=0)):
        highest = numpy.maximum.reduceat(row, first)
        before = numpy.append(0.0, row[last[:-1]])
        for instant in numpy.flatnonzero(highest > numpy.maximum(before, row[last])).tolist():
            kept.add(int(first[instant] + row[first[instant] : last[instant] + 1].argmax()))
    shown = numpy.array(sorted(kept), dtype=numpy.int64)
    when = times[shown]
    for at in (numpy.flatnonzero(when[1:] == when[:-1]) + 1).tolist():
        when[at] = when[at - 1] + 4 * numpy.spacing(when[at - 1]) if when[at - 1] else _LEAST_S
    return shown, numpy.maximum.accumulate(when)
