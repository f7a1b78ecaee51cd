"""Tasks: work other than compute and messages, such as gradient reductions, host copies, all-gathers and SYNC.

::

    device 0, compute    ... 0B7 │ 0F8 │ ......... 0STEP
                              ▼ joins              ▲
    task                     [ waits ][ runs ]─────┤      starts when all have joined and the one before it has ended
                                   ▲ joins         ▼
    device 1, compute       ... 1B7 │ 1F8 │ ...... 1STEP

A task runs for its own time, or moves bytes over links that others may be using (``moved_by``).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from ..core.actions import Kind
from ..core.cluster.cluster import Cluster
from ..core.cluster.collectives import Operation, Phase, collective_phases
from ..core.cluster.routing import Hop, path_latency_s
from ..core.costs.costs import StageCosts
from ..core.evaluate.reduction import measured, reduced, sync_bytes, sync_time
from ..core.plan.host_copies import copy_phase
from ..core.plan.items import Task
from ..core.plan.kinds import task_seconds
from ..core.plan.plan import Plan
from ..core.plan.queues import Queues
from ..core.plan.sharding import unsharded_bytes
from .collectives import Collective
from .delays import Delays, added, lost, scaled
from .device import DeviceQueue
from .network.flow_times import FlowTimes
from .network.flows import Route
from .network.network import Network
from .times import TaskTimes


class RunningTask:
    """A task in a simulated step.

    Args:
        task: the task of the plan.
        collective: runs once all members have joined.
        bytes: of each member's own part.
        devices: the queues of all devices, by rank, not yet begun.
        ahead: the task before it in its order.

    Attributes:
        on_end: called when it has ended.
        joined_s: when each of its items joined.
    """

    def __init__(
        self,
        task: Task,
        collective: Collective,
        size: float,
        devices: Sequence[DeviceQueue],
        ahead: "RunningTask | None",
    ) -> None:
        self.task, self.collective, self.bytes = task, collective, size
        self.ahead = ahead
        self.on_end: list[Callable[[], None]] = []
        self.joined_s = [0.0] * len(task.items)
        self.ended = False
        self._missing = [1 + len(item.waits) for item in task.items]
        self._absent = len(task.items)
        self._readers = [(devices[device], position) for device, position in task.readers]
        for device, position in self._readers:
            device.pending[position] += 1
        collective.on_end.append(self._end)
        if ahead is not None:
            ahead.on_end.append(self._start)

    def join(self, member: int) -> None:
        """A condition of an item is met: it is issued, or a task that it waits for has ended."""
        self._missing[member] -= 1
        if not self._missing[member]:
            self.joined_s[member] = self.collective.network.environment.now
            self._absent -= 1
            self._start()

    def close(self) -> None:
        """Drop all references, so that everything is freed at once."""
        self.on_end.clear()
        self.collective.close()

    def _start(self) -> None:
        if not self._absent and (self.ahead is None or self.ahead.ended):
            self.collective.start()

    def _end(self) -> None:
        self.ended = True
        for device, position in self._readers:
            device.arrived(position)
        for call in self.on_end:
            call()


Movement = Callable[[Task, Plan, Sequence[StageCosts], Cluster], tuple[Sequence[Sequence[Phase]], float, float]]
"""A task's transfers, step by step; the bytes of a member; and its duration in seconds if it has no transfers."""


def _gradients(
    task: Task, plan: Plan, costs: Sequence[StageCosts], cluster: Cluster
) -> tuple[Sequence[Sequence[Phase]], float, float]:
    """REDUCE_GRAD: the all-reduce or reduce-scatter that is fastest without contention, in one bucket."""
    stage = task.items[0].action.stage
    return _over_replicas(task, plan, cluster, *reduced(plan, costs, stage), measured(plan, costs, stage).reduce_s)


def _scattered(
    task: Task, plan: Plan, costs: Sequence[StageCosts], cluster: Cluster
) -> tuple[Sequence[Sequence[Phase]], float, float]:
    """SCATTER_GRAD: the reduce-scatter of the gradients of a microbatch, in one bucket."""
    stage = task.items[0].action.stage
    known = measured(plan, costs, stage).scatter_s
    return _over_replicas(task, plan, cluster, costs[stage].gradient_bytes, Operation.REDUCE_SCATTER, known)


def _unshard(
    task: Task, plan: Plan, costs: Sequence[StageCosts], cluster: Cluster
) -> tuple[Sequence[Sequence[Phase]], float, float]:
    """UNSHARD: the all-gather of the parameters, of which each replica has a part."""
    stage = task.items[0].action.stage
    known = measured(plan, costs, stage).gather_s
    return _over_replicas(task, plan, cluster, unsharded_bytes(plan, costs, stage), Operation.ALL_GATHER, known)


def _reshard(
    _: Task, __: Plan, ___: Sequence[StageCosts], ____: Cluster
) -> tuple[Sequence[Sequence[Phase]], float, float]:
    """RESHARD frees memory, and moves nothing."""
    return [], 0.0, 0.0


def _over_replicas(
    task: Task, plan: Plan, cluster: Cluster, size: float, operation: Operation, known_s: float | None
) -> tuple[Sequence[Sequence[Phase]], float, float]:
    """A collective over replicas: its phases, or its measured time, which includes its waits for shared links."""
    if known_s is not None:
        return [], size, known_s
    members = [item.device for item in task.items]
    phases = collective_phases(cluster, members, size, operation, sharers=plan.mesh.sharing)
    return [[phase] for phase in phases], size, 0.0


def _tied(
    task: Task, _: Plan, __: Sequence[StageCosts], cluster: Cluster
) -> tuple[Sequence[Sequence[Phase]], float, float]:
    """REDUCE_TIED: all send to the device of the first stage, which sends the sum back."""
    assert task.weight is not None
    first, size = task.items[0].device, task.weight.bytes
    stages = Counter(item.device for item in task.items if item.device != first)

    def one(src: int, dst: int, count: int) -> Phase:
        path = cluster.path(src, dst)
        return Phase(count * size, path_latency_s(path), path)

    gather = [one(device, first, count) for device, count in stages.items()]
    scatter = [one(first, device, count) for device, count in stages.items()]
    return [gather, scatter] if stages else [], size, 0.0


def _sync(
    task: Task, plan: Plan, _: Sequence[StageCosts], cluster: Cluster
) -> tuple[Sequence[Sequence[Phase]], float, float]:
    """SYNC: to one device and back, each way as long as the slowest transfer between two of them."""
    return [], sync_bytes(plan), sync_time(plan, cluster, [item.device for item in task.items])


def _host_copy(
    task: Task, plan: Plan, _: Sequence[StageCosts], cluster: Cluster
) -> tuple[Sequence[Sequence[Phase]], float, float]:
    """OFFLOAD and RELOAD: over the links between the device and its host."""
    phase = copy_phase(plan, task, cluster)
    return [[phase]], phase.bytes, 0.0


moved_by: dict[Kind, Movement] = {
    Kind.SCATTER_GRAD: _scattered,
    Kind.REDUCE_GRAD: _gradients,
    Kind.REDUCE_TIED: _tied,
    Kind.SYNC: _sync,
    Kind.UNSHARD: _unshard,
    Kind.RESHARD: _reshard,
    Kind.OFFLOAD: _host_copy,
    Kind.RELOAD: _host_copy,
}
"""The kinds whose tasks depend on links or members; every other kind has a declared duration."""


def run_tasks(
    network: Network,
    plan: Plan,
    costs: Sequence[StageCosts],
    cluster: Cluster,
    queues: Queues,
    devices: Sequence[DeviceQueue],
    joined: Sequence[Task] | None = None,
) -> list[RunningTask]:
    """All tasks of a step, joined where devices issue their items.

    Args:
        network: whose links they cross.
        plan, costs: give the sizes.
        cluster: its devices in the order of ranks.
        queues: of the lowered plan with all its replicas.
        devices: by rank, not yet started.
        joined: the same tasks with the items of all replicas, where ``queues`` and ``devices`` are of one of them.
    """
    result: list[RunningTask] = []
    latest: dict[tuple[str, int], RunningTask] = {}
    routes: dict[tuple[str, int], dict[tuple[Hop, ...], Route]] = {}  # of tasks of one device, by their order
    for number, task in enumerate(queues.tasks):
        if task.kind in moved_by:
            members = task if joined is None else joined[number]
            phases, size, delay_s = moved_by[task.kind](members, plan, costs, cluster)
        else:
            phases, size, delay_s = (), 0.0, task_seconds(task, costs) or 0.0
        ahead = None if task.order is None else latest.get(task.order)
        known = routes.setdefault(task.order, {}) if task.order is not None and len(task.items) == 1 else None
        running = RunningTask(task, Collective(network, phases, delay_s, known), size, devices, ahead)
        if task.order is not None:
            latest[task.order] = running
        for member, item in enumerate(task.items):
            join = partial(running.join, member)
            devices[item.device].between[item.issued].append(join)
            for other in item.waits:
                result[other].on_end.append(join)
        result.append(running)
    return result


def task_flows(tasks: Sequence[RunningTask]) -> tuple[FlowTimes, ...]:
    """The flows of all tasks."""
    return tuple(flow.times for running in tasks for step in running.collective.steps for flow in step)


def task_times(tasks: Sequence[RunningTask]) -> tuple[TaskTimes, ...]:
    """The times of each device's items, device by device in the order issued.

    An action that takes part in several tasks ends with the last of them, and has the bytes of all.
    """
    found: dict[tuple[int, int], list[tuple[RunningTask, int, Delays]]] = {}
    for running, delays in zip(tasks, _delays(tasks), strict=True):
        for member, item in enumerate(running.task.items):
            found.setdefault((item.device, item.place), []).append((running, member, delays))
    result = []
    for _, parts in sorted(found.items(), key=lambda entry: entry[0]):
        running, member, delays = max(parts, key=lambda part: part[0].collective.end_s)
        item, collective = running.task.items[member], running.collective
        times = running.joined_s[member], collective.end_s, collective.start_s
        size = sum(part[0].bytes for part in parts)
        result.append(TaskTimes(item.device, item.queue, item.action, *times, size, delays))
    return tuple(result)


def _delays(tasks: Sequence[RunningTask]) -> list[Delays]:
    """Per task and full link the delay of its end because others shared the link, including delays of earlier tasks."""
    result: list[Delays] = []
    known: dict[int, tuple[Delays, float]] = {}
    for running in tasks:
        collective = running.collective
        delays, end_alone_s = known.get(id(running.ahead), ({}, 0.0))
        start_alone_s = max(*running.joined_s, end_alone_s)
        own = added(lost(slowest) for slowest in collective.slowest)
        delays = added((scaled(delays, collective.start_s - start_alone_s), own))
        known[id(running)] = delays, start_alone_s + collective.alone_s
        result.append(delays)
    return result
