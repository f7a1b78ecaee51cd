"""The result of a simulated step: its times, and derived values that are computed on first access."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import frozen

from ..core.actions import WORK_KINDS, Action, Kind
from ..core.cluster.cluster import Cluster, Device
from ..core.costs.costs import StageCosts
from ..core.lowering.queues import Queues
from ..core.lowering.residency import Timeline, device_timelines
from ..core.plan.plan import Plan
from ..core.ratios import bubble_ratio
from ..core.timing.idle import KnownStep
from ..core.timing.not_offloaded import NotOffloaded, tensors_not_offloaded
from ..core.trace.trace import LinkTrack, Trace
from .bubbles import Bubbles, device_bubbles
from .hosts import CopyUse, HostUse, copy_uses, host_uses
from .links import LinkUse, link_rates, link_uses
from .network.flow_times import Direction, FlowTimes
from .times import QueueTimes, TaskTimes
from .tracing import build_trace


@frozen(slots=False, eq=False)
class SimulationResult:
    """One simulated step. Times in seconds, sizes in bytes, tuples by device: over a data dimension by rank
    (``panpipe.core.cluster.mesh.Mesh``).

    Args:
        plan, costs: what was simulated.
        cluster: its devices in the order of ranks.
        queues: of the lowered plan with all its replicas.
        operation_times: per device the starts and the ends of its operations.
        queue_times: per ordered pair of devices its messages.
        tasks: the items of tasks other than compute and messages: host copies, reductions, and SYNC if the plan has
            one; device by device in the order issued.
        task_flows: flows of the tasks.
        has_memory: whether memory was simulated; otherwise all memory values are empty.
        by_default: whether the options of the run were the default ones, as in the runs that the causes of idle time
            compare.
    """

    plan: Plan
    costs: Sequence[StageCosts]
    cluster: Cluster
    queues: Queues
    operation_times: tuple[tuple[list[float], list[float]], ...]
    queue_times: Mapping[tuple[int, int], QueueTimes]
    tasks: tuple[TaskTimes, ...] = ()
    task_flows: tuple[FlowTimes, ...] = ()
    has_memory: bool = True
    by_default: bool = False

    @cached_property
    def step_s(self) -> float:
        """From the start of the step until the last device is done, on all of its queues."""
        ends = [ends[-1] for _, ends in self.operation_times if ends]
        return max([*ends, *(task.end_s for task in self.tasks)], default=0.0)

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
        return {pair: (times.starts, times.arrivals) for pair, times in self.queue_times.items()}

    @cached_property
    def _idle(self) -> tuple[Bubbles, ...]:
        return device_bubbles(self.queues, self.operation_times, self.queue_times, self.tasks, self.step_s)

    @property
    def bubbles(self) -> tuple[dict[str, float], ...]:
        """Per device its idle seconds by cause (``panpipe.simulators.bubbles.CAUSES``)."""
        return tuple(bubbles.causes for bubbles in self._idle)

    @property
    def contention(self) -> tuple[dict[Direction, float], ...]:
        """Per device its idle seconds of contention, by the full link (source, destination) that caused them."""
        return tuple(bubbles.contention for bubbles in self._idle)

    @cached_property
    def known_step(self) -> KnownStep | None:
        """What this run shows of the causes of idle time; None if its options were not the default ones."""
        if not self.by_default:
            return None
        return KnownStep(self.step_s, self._without_update_s, self._contended)

    @property
    def _without_update_s(self) -> float | None:
        """The step without what ends it; None where gradients are summed, which may delay other work."""
        if any(
            task.action.kind in (Kind.SCATTER_GRAD, Kind.REDUCE_GRAD, Kind.REDUCE_TIED, Kind.UNSHARD)
            for task in self.tasks
        ):
            return None
        done = [task.end_s for task in self.tasks if task.action.kind is not Kind.SYNC]
        for actions, (_, ends) in zip(self.queues.compute, self.operation_times, strict=True):
            steps = sum(action.kind is Kind.STEP for action in actions)  # a device's last operations
            done += ends[: len(ends) - steps][-1:]
        return max(done, default=0.0)

    @property
    def _contended(self) -> bool:
        """Whether a transfer was slower than on a path of its own."""
        return any(piece.held_by is not None for flow in self.flows for piece in flow.pieces or ())

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """Per device its memory over the step."""
        if not self.has_memory:
            return ()
        arrivals = {pair: times.arrivals for pair, times in self.queue_times.items()}
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
        """Memory of each host that devices offload to; empty if memory was not simulated."""
        return host_uses(self.plan, self.cluster, self.timelines) if self.has_memory else ()

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
        messages = (flow for times in self.queue_times.values() for flow in times.flows)
        return (*messages, *self.task_flows)

    @cached_property
    def trace(self) -> Trace:
        """Action by action. Trace.source is ``simulated``."""
        return build_trace(self)
