"""Tasks: work other than compute and messages, such as gradient reductions, host copies, all-gathers and SYNC.

::

    device 0, compute    ... 0B7 │ 0F8 │ ......... 0STEP
                              ▼ joins              ▲
    task                     [ waits ][ runs ]─────┤      starts when all have joined and the one before it has ended
                                   ▲ joins         ▼
    device 1, compute       ... 1B7 │ 1F8 │ ...... 1STEP

A task runs for its own time, or moves bytes over links that others may be using (``TaskKind.moves``): flows over the
links between its members, one step after another.
"""

from collections.abc import Callable, Sequence
from functools import partial

from attrs import frozen
from simpy.events import Timeout

from ..core.actions import Action
from ..core.cluster.cluster import Cluster
from ..core.cluster.collectives import Phase
from ..core.cluster.routing import Hop
from ..core.costs.costs import StageCosts
from ..core.lowering.queues import Queues
from ..core.plan.items import Task
from ..core.plan.kinds import Movement, movement
from ..core.plan.plan import Plan
from .device import DeviceQueue
from .network import Flow, FlowTimes, Network, Route


@frozen
class TaskTimes:
    """An item of a task other than compute: a reduction, a SYNC.

    Args:
        issued_s, end_s: when it was issued with all its conditions met, and when it ended, in seconds.
        start_s: when all members had joined.
        bytes: of the device's own part.
    """

    device: int
    queue: str
    action: Action
    issued_s: float
    end_s: float
    start_s: float = 0.0
    bytes: float = 0.0


Routes = dict[tuple[tuple[Hop, ...], float], Route]


class RunningTask:
    """A task in a simulated step.

    Args:
        moved: its transfers, by steps; the flows of a step run at the same time.
        devices: the queues of all devices, by rank, not yet begun.
        ahead: the task before it in its order.
        routes: those of tasks that never run at the same time as this one, by what they cross and latency; new ones are
            added. None if there are no such tasks.

    Attributes:
        steps: the flows of each step.
        on_end: called when it has ended.
        joined_s: when each of its items joined.
        start_s, end_s: when all had joined and the task before it had ended, and when it had ended.
    """

    def __init__(
        self,
        network: Network,
        task: Task,
        moved: Movement,
        devices: Sequence[DeviceQueue],
        ahead: "RunningTask | None",
        routes: Routes | None,
    ) -> None:
        self.network, self.task, self.bytes, self.ahead = network, task, moved.bytes, ahead
        self.delay_s = moved.seconds
        self.steps = [
            [Flow(_route(network, phase, routes), phase.bytes, self._arrived) for phase in step] for step in moved.steps
        ]
        self.on_end: list[Callable[[], None]] = []
        self.joined_s = [0.0] * len(task.items)
        self.start_s = self.end_s = 0.0
        self.ended = False
        self._begun = self._under_way = 0
        self._missing = [1 + len(item.waits) for item in task.items]
        self._absent = len(task.items)
        self._readers = [(devices[device], position) for device, position in task.readers]
        for device, position in self._readers:
            device.pending[position] += 1
        if ahead is not None:
            ahead.on_end.append(self._start)

    def join(self, member: int) -> None:
        """A condition of an item is met: it is issued, or a task that it waits for has ended."""
        self._missing[member] -= 1
        if not self._missing[member]:
            self.joined_s[member] = self.network.environment.now
            self._absent -= 1
            self._start()

    def _start(self) -> None:
        if self._absent or (self.ahead is not None and not self.ahead.ended):
            return
        self.start_s = self.network.environment.now
        if self.steps:
            self._advance()
        else:  # the end is an event, as every arrival is, even where nothing moves
            Timeout(self.network.environment, self.delay_s).callbacks.append(lambda _: self._advance())

    def _arrived(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._advance()

    def _advance(self) -> None:
        """Start the next step, or end."""
        if self._begun < len(self.steps):
            self._begun += 1
            step = self.steps[self._begun - 1]
            self._under_way = len(step)
            for flow in step:
                self.network.start(flow)
            return
        self.end_s = self.network.environment.now
        self.ended = True
        for device, position in self._readers:
            device.arrived(position)
        for call in self.on_end:
            call()


def _route(network: Network, phase: Phase, routes: Routes | None) -> Route:
    key = phase.crossings, phase.latency_s
    known = None if routes is None else routes.get(key)
    route = known or network.route(*key, phase.bytes_per_s)
    if routes is not None:
        routes[key] = route
    return route


def run_tasks(
    network: Network,
    plan: Plan,
    costs: Sequence[StageCosts],
    cluster: Cluster,
    queues: Queues,
    devices: Sequence[DeviceQueue],
) -> list[RunningTask]:
    """All tasks of a step, joined where devices issue their items."""
    result: list[RunningTask] = []
    latest: dict[tuple[str, int], RunningTask] = {}
    routes: dict[tuple[str, int], Routes] = {}  # of tasks of one device, by their order
    for task in queues.tasks:
        moved = movement(task, plan, costs, cluster)
        ahead = None if task.order is None else latest.get(task.order)
        known = routes.setdefault(task.order, {}) if task.order is not None and len(task.items) == 1 else None
        running = RunningTask(network, task, moved, devices, ahead, known)
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
    return tuple(flow.times for running in tasks for step in running.steps for flow in step)


def task_times(tasks: Sequence[RunningTask]) -> tuple[TaskTimes, ...]:
    """The times of each device's items, device by device in the order issued.

    An action that takes part in several tasks ends with the last of them, and has the bytes of all.
    """
    found: dict[tuple[int, int], list[tuple[RunningTask, int]]] = {}
    for running in tasks:
        for member, item in enumerate(running.task.items):
            found.setdefault((item.device, item.place), []).append((running, member))
    result = []
    for _, parts in sorted(found.items(), key=lambda entry: entry[0]):
        running, member = max(parts, key=lambda part: part[0].end_s)
        item = running.task.items[member]
        times = running.joined_s[member], running.end_s, running.start_s
        size = sum(part[0].bytes for part in parts)
        result.append(TaskTimes(item.device, item.queue, item.action, *times, size))
    return tuple(result)
