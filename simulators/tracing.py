"""The trace of a simulated step, in the common schema of simulator and runtimes."""

from collections.abc import Iterator, Sequence

from ..core.actions import Kind
from ..core.plan.plan import Plan
from ..core.plan.residency import MOVING_KINDS, STATE_KINDS, Timeline
from ..core.trace.trace import (
    COMPUTE_QUEUE,
    HOST_MEMORY,
    LinkTrack,
    MemorySample,
    Trace,
    TraceEvent,
    receive_queue,
    send_queue,
)
from .times import StepTimes


def build_trace(
    plan: Plan,
    times: StepTimes,
    timelines: Sequence[Timeline],
    links: tuple[LinkTrack, ...],
    reference_s: float | None = None,
) -> Trace:
    """The trace: events of all queues in order of start, a memory sample for every change, and the use of the links.

    ``reference_s`` is the time of the reference workload when the costs were measured. Events of one queue that start
    at the same time stay in the order issued: the reductions are before the optimizer steps.
    """
    operations = list(_operations(times))
    steps = [event for event in operations if event.action.kind is Kind.STEP]
    work = [event for event in operations if event.action.kind is not Kind.STEP]
    events = [*work, *_tasks(times), *steps, *_transfers(times)]
    events.sort(key=lambda event: (event.start_s, event.device))
    samples = [sample for device, timeline in enumerate(timelines) for sample in _memory_samples(device, timeline)]
    samples.sort(key=lambda sample: sample.time_s)
    return Trace(
        "simulated", plan.hash, plan.mesh.ranks, tuple(events), tuple(samples), times.step_s, links, reference_s
    )


def _operations(times: StepTimes) -> Iterator[TraceEvent]:
    for device, actions in enumerate(times.queues.compute):
        for action, start_s, end_s in zip(actions, *times.operations[device], strict=True):
            yield TraceEvent(device, COMPUTE_QUEUE, action, start_s, end_s)


def _tasks(times: StepTimes) -> Iterator[TraceEvent]:
    """Tasks on the compute queue occupy it from their issue, one after another, because the steps wait for them."""
    free_s: dict[int, float] = {}
    for task in times.tasks:
        if task.queue != COMPUTE_QUEUE:
            yield TraceEvent(task.device, task.queue, task.action, task.start_s, task.end_s, task.bytes)
        else:
            start_s = max(task.issued_s, free_s.get(task.device, 0.0))
            end_s = free_s[task.device] = max(start_s, task.end_s)
            yield TraceEvent(task.device, COMPUTE_QUEUE, task.action, start_s, end_s)


def _transfers(times: StepTimes) -> Iterator[TraceEvent]:
    for (src, dst), messages in times.queues.messages.items():
        for message, start_s, end_s in zip(messages, *times.transfers[src, dst], strict=True):
            yield TraceEvent(src, send_queue(dst), message.send, start_s, end_s, message.bytes)
            yield TraceEvent(dst, receive_queue(src), message.receive, start_s, end_s, message.bytes)


def _memory_samples(device: int, timeline: Timeline) -> Iterator[MemorySample]:
    """Each kind at the start, and then at each change; several changes at one time give one sample. The host's memory
    only of a device that offloads."""
    for kind, size in zip(STATE_KINDS, timeline.state, strict=True):
        yield MemorySample(device, 0.0, kind, size)
    times = timeline.times.tolist()
    rows = dict(zip(MOVING_KINDS, timeline.moving.tolist(), strict=True))
    if timeline.host.any():
        rows[HOST_MEMORY] = timeline.host.tolist()
    for kind, row in rows.items():
        known = None
        for i, size in enumerate(row):
            if (i + 1 == len(row) or times[i + 1] != times[i]) and size != known:
                known = size
                yield MemorySample(device, times[i], kind, size)
