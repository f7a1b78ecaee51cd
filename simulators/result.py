"""The result of a simulated step: its times, and derived values that are computed on first access, such as its trace in
the schema that simulator and runtimes share."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain

import numpy
from attrs import frozen
from numpy.typing import NDArray

from ..core.actions import WORK_KINDS, Action, Kind
from ..core.cluster.cluster import Cluster, Device
from ..core.costs.costs import StageCosts
from ..core.lowering.queues import Queues
from ..core.lowering.residency import Timeline, device_timelines
from ..core.offload.not_offloaded import NotOffloaded, tensors_not_offloaded
from ..core.plan.plan import Plan
from ..core.ratios import bubble_ratio
from ..core.trace.trace import (
    COMPUTE_QUEUE,
    HOST_MEMORY,
    MEMORY_KINDS,
    LinkTrack,
    MemorySample,
    Trace,
    TraceEvent,
    receive_queue,
    send_queue,
)
from .bubbles import device_bubbles
from .network import FlowTimes
from .tasks import TaskTimes
from .usage import CopyUse, HostUse, LinkUse, copy_uses, host_uses, link_rates, link_uses


@frozen(slots=False, eq=False)
class SimulationResult:
    """One simulated step. Times in seconds, sizes in bytes, tuples by device: over a data dimension by rank
    (``panpipe.core.cluster.mesh.Mesh``).

    Args:
        plan, costs: what was simulated.
        cluster: its devices in the order of ranks.
        queues: of the lowered plan with all its replicas.
        operation_times: per device the starts and the ends of its operations.
        messages: per ordered pair of devices its messages, in order.
        tasks: the items of tasks other than compute and messages: host copies, reductions, and SYNC if the plan has
            one; device by device in the order issued.
        task_flows: flows of the tasks.
    """

    plan: Plan
    costs: Sequence[StageCosts]
    cluster: Cluster
    queues: Queues
    operation_times: tuple[tuple[list[float], list[float]], ...]
    messages: Mapping[tuple[int, int], Sequence[FlowTimes]]
    tasks: tuple[TaskTimes, ...] = ()
    task_flows: tuple[FlowTimes, ...] = ()

    @cached_property
    def step_s(self) -> float:
        """From the start of the step until the last device is done, on all of its queues."""
        ends = [ends[-1] for _, ends in self.operation_times if ends]
        return max([*ends, *(task.end_s for task in self.tasks)], default=0.0)

    @property
    def without_update_s(self) -> float | None:
        """The step without optimizer steps and SYNC; None where transfers share links, or tasks sum gradients or gather
        parameters, which may delay other work."""
        summed = (Kind.SCATTER_GRAD, Kind.REDUCE_GRAD, Kind.REDUCE_TIED, Kind.UNSHARD)
        if any(use.delay_s for use in self.links) or any(task.action.kind in summed for task in self.tasks):
            return None
        done = [task.end_s for task in self.tasks if task.action.kind is not Kind.SYNC]
        for actions, (_, ends) in zip(self.queues.compute, self.operation_times, strict=True):
            steps = sum(action.kind is Kind.STEP for action in actions)  # a device's last operations
            done += ends[: len(ends) - steps][-1:]
        return max(done, default=0.0)

    @cached_property
    def stage_span_s(self) -> float:
        """The longest time over devices from first start to last end.

        The time from one training step to the next where no barrier holds the devices together (Zero Bubble, arXiv
        2401.10241).
        """
        return max((ends[-1] - starts[0] for starts, ends in self.operation_times if ends), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Per device the time in F, I, W, B and RECOMPUTE."""
        return tuple(
            sum(
                end - start
                for action, start, end in zip(actions, starts, ends, strict=True)
                if action.kind in WORK_KINDS
            )
            for actions, (starts, ends) in zip(self.queues.compute, self.operation_times, strict=True)
        )

    @property
    def bubble_ratio(self) -> float:
        """1 − the busiest device's compute time ÷ step time."""
        return bubble_ratio(max(self.busy_s), self.step_s)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The cluster's devices that were used, by rank."""
        return self.cluster.devices[: self.plan.mesh.ranks]

    @cached_property
    def transfer_times(self) -> dict[tuple[int, int], tuple[list[float], list[float]]]:
        """Per ordered pair of devices the starts and the arrivals of its messages."""
        return {
            pair: ([flow.start_s for flow in flows], [flow.arrived_s for flow in flows])
            for pair, flows in self.messages.items()
        }

    @cached_property
    def bubbles(self) -> tuple[dict[str, float], ...]:
        """Per device its idle seconds by cause (``panpipe.simulators.bubbles.CAUSES``)."""
        return device_bubbles(self.queues, self.operation_times, self.messages, self.tasks, self.step_s)

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """Per device its memory over the step."""
        arrivals = {pair: times[1] for pair, times in self.transfer_times.items()}
        return device_timelines(self.plan, self.costs, self.queues, self.operation_times, arrivals)

    @cached_property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        """Per device its peak memory, all kinds together."""
        return tuple(timeline.peak_bytes for timeline in self.timelines)

    @cached_property
    def peak_actions(self) -> tuple[Action | None, ...]:
        """Per device the action that reaches its peak."""
        return tuple(timeline.peak_action for timeline in self.timelines)

    @cached_property
    def peak_saved_bytes(self) -> tuple[float, ...]:
        """Per device the peak of its saved tensors."""
        return tuple(timeline.peak_saved_bytes for timeline in self.timelines)

    @cached_property
    def peak_by_kind(self) -> tuple[dict[str, float], ...]:
        """Per device the peak of each kind of memory, each at its own time."""
        return tuple(timeline.peak_by_kind for timeline in self.timelines)

    @cached_property
    def memory_at_peak(self) -> tuple[dict[str, float], ...]:
        """Per device its bytes of each kind of memory at its peak."""
        return tuple(timeline.at_peak for timeline in self.timelines)

    @cached_property
    def hosts(self) -> tuple[HostUse, ...]:
        """Memory of each host that devices offload to."""
        return host_uses(self.plan, self.cluster, self.timelines)

    @cached_property
    def host_copies(self) -> tuple[CopyUse, ...]:
        """Copies between devices and hosts, per device and direction."""
        return copy_uses(self.tasks)

    @cached_property
    def kept(self) -> tuple[NotOffloaded, ...]:
        """What stays on the devices of a plan that offloads, with the reasons."""
        if not self.plan.memory.offload:
            return ()
        spans = {
            action: (start, end)
            for actions, times in zip(self.queues.compute[: self.plan.devices], self.operation_times, strict=False)
            for action, start, end in zip(actions, *times, strict=True)
        }
        return tensors_not_offloaded(self.plan, self.costs, self.cluster, spans)

    @cached_property
    def links(self) -> tuple[LinkUse, ...]:
        """Use of each link direction with traffic, in the cluster's order."""
        return link_uses(self.cluster, self.flows, self.step_s)

    @cached_property
    def link_rates(self) -> tuple[LinkTrack, ...]:
        """Rate over time of each of these directions; links of infinite bandwidth are omitted."""
        return link_rates(self.cluster, self.flows)

    @cached_property
    def flows(self) -> tuple[FlowTimes, ...]:
        """All flows: the messages, queue by queue, then the tasks' flows."""
        return (*chain.from_iterable(self.messages.values()), *self.task_flows)

    @cached_property
    def trace(self) -> Trace:
        """Action by action. Trace.source is ``simulated``."""
        return build_trace(self)


_LEAST_S = 1e-15
"""Seconds after the start at which what follows a peak at the start is shown."""


def build_trace(result: SimulationResult) -> Trace:
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


def _operations(result: SimulationResult) -> Iterator[TraceEvent]:
    for device, actions in enumerate(result.queues.compute):
        for action, start_s, end_s in zip(actions, *result.operation_times[device], strict=True):
            yield TraceEvent(device, COMPUTE_QUEUE, action, start_s, end_s)


def _tasks(result: SimulationResult) -> Iterator[TraceEvent]:
    """Tasks on the compute queue occupy it from their issue, one after another, because the steps wait for them."""
    free_s: dict[int, float] = {}
    for task in result.tasks:
        if task.queue != COMPUTE_QUEUE:
            yield TraceEvent(task.device, task.queue, task.action, task.start_s, task.end_s, task.bytes)
        else:
            start_s = max(task.issued_s, free_s.get(task.device, 0.0))
            end_s = free_s[task.device] = max(start_s, task.end_s)
            yield TraceEvent(task.device, COMPUTE_QUEUE, task.action, start_s, end_s)


def _transfers(result: SimulationResult) -> Iterator[TraceEvent]:
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
