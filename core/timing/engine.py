"""The engine: when each action of a step runs, where no two queues share a link; and which waits are circular.

Each device runs its compute items until an input is missing; the device that it waits for resumes it::

    device 0   0F0  0F1  0F2 ·············  runs until its first backward, which waits for device 1
    device 1        1F0  1B0 1F1 ·········  runs until it needs the message after 0F2, and so on

What waits for what (``core/plan/items.py``):

1. a compute item waits for the one before it on its device, and for its inputs;
2. an input is a pure delay after the item that computes it (``read``), or a message of an in-order queue (``queue``). A
   message waits for its send (the compute item before that), for its receive to be posted (likewise), and for the
   message before it in its queue. It is computed when its reader is reached: both ends of a queue have one order, so
   its receive and those of the messages before it are posted by then, and only the sender may be late;
3. a task waits for each of its items to be issued (the compute item before that), for the tasks that its items wait
   for, and for the task before it in its order; its readers wait for it;
4. where a limit is given on how far a stage runs ahead of its readers (see `backpressure`), F waits for the transfer of
   the stage's output that many microbatches before, to each of its readers.

Nothing is stored for other dependencies, so that the engine is also fit for plans of a million actions. It is the only
computation of times that knows every policy: validation, the planner's own score of a plan, and the evaluation of
schedules run it. `compiled` has the same rules for compute orders inside searches, `contended` adds shared links, and
the simulator is independent of all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..actions import Action, Kind
from ..costs.costs import Compute, StageCosts, compute_times
from ..errors import RequestError
from ..lowering.message_matching import computed_at
from ..plan.items import Message, Task

if TYPE_CHECKING:  # schedules are evaluated without loading what plans need
    from ..lowering.queues import Queues
    from ..plan.plan import Plan

Progress = tuple[int, int]
"""A device, and how many of its compute items have ended."""

AheadLimit = Callable[[int, int], int]
"""(stage, reader) → how many microbatches the stage may run ahead of the transfers to that reader."""

READS = "reads its output"
_Condition = tuple[Callable[[int, Any, int], float | None], Any, int]
"""What an item waits for in addition to its reads: (device, queue, number) → when it is met, or None after the device
has begun to wait; the queue; and the number of a message or task."""

_AHEAD = "may not run further ahead of it"
_IN_USE = -1.0
"""End of a task while its conditions are being computed: a task that waits for itself never ends."""


class _Queue:
    """The messages from one device to another, computed in order."""

    __slots__ = ("arrivals", "bytes_per_s", "dst", "eager", "free_s", "latency_s", "messages", "src")

    def __init__(self, src: int, dst: int, messages: Sequence[Message], hop: tuple[float, float], eager: bool) -> None:
        self.src, self.dst, self.messages, self.eager = src, dst, messages, eager
        self.latency_s, self.bytes_per_s = hop
        self.arrivals: list[float] = []
        self.free_s = 0.0

    def advance(self, count: int, sent: Sequence[float], run: Sequence[float]) -> None:
        """Compute the first ``count`` messages, from the ends of the sender's and of the receiver's compute items."""
        latency_s, bytes_per_s, free_s, eager = self.latency_s, self.bytes_per_s, self.free_s, self.eager
        for _, _, _, _, size, issued, posted, _ in self.messages[len(self.arrivals) : count]:
            start = max(sent[issued], free_s)
            if posted and not eager and run[posted - 1] > start:
                start = run[posted - 1]
            seconds = size / bytes_per_s
            free_s = start + seconds
            self.arrivals.append(start + (seconds + latency_s))  # as the simulator adds them
        self.free_s = free_s


class Engine:
    """One step: the times of compute items, messages and tasks, in seconds, as far as they are computed.

    Args:
        compute: per device its compute items, in order.
        seconds: of each of them.
        tasks: of other queues.
        task_s: duration of each task.

    Attributes:
        starts, ends: per device, of its compute items.
        task_ends: of tasks.
    """

    def __init__(
        self,
        compute: Compute,
        seconds: Sequence[Sequence[float]],
        tasks: Sequence[Task] = (),
        task_s: Sequence[float] = (),
    ) -> None:
        self._compute, self._seconds, self._tasks, self._task_s = compute, seconds, tasks, task_s
        self.starts: list[list[float]] = [[] for _ in compute]
        self.ends: list[list[float]] = [[] for _ in compute]
        self._reads: list[list[tuple[tuple[int, int, float], ...]]] = [[()] * len(own) for own in compute]
        self._queues: dict[tuple[int, int], _Queue] = {}
        self._conditions: list[dict[int, list[_Condition]]] = [{} for _ in compute]
        self._ahead: list[int | None] = []
        latest: dict[tuple[str, int], int] = {}
        for number, task in enumerate(tasks):
            for device, position in task.readers:
                self._conditions[device].setdefault(position, []).append((self._task_end, None, number))
            self._ahead.append(None if task.order is None else latest.get(task.order))
            if task.order is not None:
                latest[task.order] = number
        self.task_ends: list[float | None] = [None] * len(tasks)
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in compute]  # (count of items, device that waits)
        self._blocked: list[tuple[int, int, str]] = [(-1, 0, "")] * len(compute)
        """Per device what it waited for last: a device (−1: a task that waits for itself), its count of items, why."""

    def read(self, device: int, source: int, pairs: Iterable[tuple[int, int]], delay_s: float) -> None:
        """Let items of a device wait until some time after items of another one have ended.

        Args:
            device, source: the device that waits, and the other one.
            pairs: the position of an item that waits, and that of the other one.
            delay_s: from its end on.
        """
        row = self._reads[device]
        for position, issued in pairs:
            row[position] += ((source, issued, delay_s),)

    def queue(
        self, src: int, dst: int, messages: Sequence[Message], hop: tuple[float, float], *, eager: bool = False
    ) -> None:
        """Add the messages from one device to another, in the order of both ends.

        Args:
            src, dst: the devices.
            messages: between them.
            hop: latency in seconds, and bytes/s.
            eager: a send needs no posted receive.
        """
        queue = self._queues[src, dst] = _Queue(src, dst, messages, hop, eager)
        received, conditions = self._arrival, self._conditions[dst]
        for count, message in enumerate(messages, 1):
            conditions.setdefault(message.reader, []).append((received, queue, count))

    def limit_ahead(self, limit: AheadLimit) -> None:
        """Let forwards wait until their stage is no longer too far ahead of its readers; after all queues are added."""
        forwards = {
            (action.stage, action.microbatch): position
            for actions in self._compute
            for position, action in enumerate(actions)
            if action.kind is Kind.F
        }
        for queue in self._queues.values():
            for count, message in enumerate(queue.messages, 1):
                stage, reader, microbatch = message.send.stage, message.send.peer, message.send.microbatch
                if message.send.kind is Kind.SEND_F and reader is not None and microbatch is not None:
                    later = forwards.get((stage, microbatch + limit(stage, reader)))
                    if later is not None:
                        self._conditions[queue.src].setdefault(later, []).append((self._transfer, queue, count))

    @property
    def operations(self) -> tuple[tuple[list[float], list[float]], ...]:
        """Per device the starts and the ends of its compute items."""
        return tuple(zip(self.starts, self.ends, strict=True))

    @property
    def arrivals(self) -> dict[tuple[int, int], list[float]]:
        """Per ordered pair of devices when each message of its queue has arrived."""
        return {pair: queue.arrivals for pair, queue in self._queues.items()}

    @property
    def step_s(self) -> float:
        """When everything has ended."""
        return max([*(own[-1] for own in self.ends if own), *(end or 0.0 for end in self.task_ends)], default=0.0)

    def run(self) -> bool:
        """Run all devices; whether the step runs to its end."""
        ready = list(range(len(self.ends)))
        while ready:
            device = ready.pop()
            self._advance(device)
            done, still = len(self.ends[device]), []
            for count, other in self._waiting[device]:
                if done >= count:
                    ready.append(other)
                else:
                    still.append((count, other))
            self._waiting[device] = still
        if any(len(own) < len(seconds) for own, seconds in zip(self.ends, self._seconds, strict=True)):
            return False
        return all(self._missing(task) is None for task in range(len(self.task_ends)))

    def latest(self) -> tuple[list[list[float]], list[list[float]]]:
        """The latest starts and ends of compute items with which no device ends later, after a run without tasks."""
        readers: list[dict[int, list[tuple[int, int, float]]]] = [{} for _ in self._compute]
        for device, row in enumerate(self._reads):
            for position, reads in enumerate(row):
                for source, issued, delay_s in reads:
                    readers[source].setdefault(issued, []).append((device, position, delay_s))
        starts, ends = [list(own) for own in self.starts], [list(own) for own in self.ends]
        left, before = [len(own) for own in ends], -1
        while sum(left) != before:
            before = sum(left)
            for device, own in enumerate(readers):
                while left[device]:
                    at = left[device] - 1
                    after = own.get(at, ())
                    if any(left[reader] > position for reader, position, _ in after):
                        break
                    end = ends[device][at] if at + 1 == len(ends[device]) else starts[device][at + 1]
                    end = min([end, *(starts[reader][position] - delay_s for reader, position, delay_s in after)])
                    starts[device][at], ends[device][at] = end - (ends[device][at] - starts[device][at]), end
                    left[device] = at
        return starts, ends

    def cycle(self) -> list[str]:
        """The waits of a step that does not run to its end: from a blocked device to the one that it waits for, until
        one recurs."""
        device = next((at for at, own in enumerate(self.ends) if len(own) < len(self._seconds[at])), -1)
        path: list[int] = []
        while device >= 0 and device not in path:
            path.append(device)
            device = self._blocked[device][0]
        waits = []
        for at in path[path.index(device) :] if device in path else path[-1:]:
            other, count, why = self._blocked[at]
            actions, stuck = self._compute[at], len(self.ends[at])
            if other < 0:
                waits.append(f"{actions[stuck]} waits for itself ({why})")
                continue
            wanted, now = self._compute[other][count - 1], self._compute[other][len(self.ends[other])]
            waits.append(f"{actions[stuck]} waits for {wanted} ({why})")
            if wanted != now:
                waits.append(f"{wanted} waits for {now} (runs after it)")
        return waits or ["its tasks after the last compute action wait for each other"]

    def _advance(self, device: int) -> None:
        """Run a device until it is done, or waits for another one."""
        starts, ends, conditions = self.starts[device], self.ends[device], self._conditions[device]
        all_ends, reads, seconds = self.ends, self._reads[device], self._seconds[device]
        now = ends[-1] if ends else 0.0
        for position in range(len(ends), len(seconds)):
            start = now
            for source, issued, delay_s in reads[position]:
                sent = all_ends[source]
                if len(sent) <= issued:
                    return self._wait(device, source, issued + 1, READS)
                if sent[issued] + delay_s > start:  # noqa: PLR1730 - max() costs a tenth of the whole pass
                    start = sent[issued] + delay_s
            if conditions and position in conditions:
                for check, queue, count in conditions[position]:
                    met = check(device, queue, count)
                    if met is None:
                        return None
                    start = max(start, met)
            starts.append(start)
            now = start + seconds[position]
            ends.append(now)
        return None

    def _arrival(self, device: int, queue: _Queue, count: int) -> float | None:
        """When a message has arrived that a device reads; None if the device waits for its send."""
        if len(queue.arrivals) < count:
            sent, issued = self.ends[queue.src], queue.messages[count - 1].issued
            if len(sent) <= issued:
                self._wait(device, queue.src, issued + 1, READS)
                return None
            queue.advance(count, sent, self.ends[device])
        return queue.arrivals[count - 1]

    def _transfer(self, device: int, queue: _Queue, count: int) -> float | None:
        """When a message of a device has arrived, before which it may not run further ahead; None if it waits."""
        message = queue.messages[count - 1]
        if len(self.ends[device]) <= message.issued:
            self._wait(device, device, message.issued + 1, _AHEAD)
            return None
        if len(self.ends[queue.dst]) < message.posted:
            self._wait(device, queue.dst, message.posted, _AHEAD)
            return None
        queue.advance(count, self.ends[device], self.ends[queue.dst])
        return queue.arrivals[count - 1]

    def _task_end(self, device: int, _: None, number: int) -> float | None:
        """When a task has ended that a device waits for; None if the device waits for what it waits for."""
        missing = self._missing(number)
        if missing is not None:
            self._wait(device, *missing, self._tasks[number].reason)
            return None
        return self.task_ends[number] or 0.0

    def _wait(self, device: int, other: int, count: int, why: str) -> None:
        """Let a device wait until as many items of another one have ended."""
        self._blocked[device] = other, count, why
        if other >= 0:
            self._waiting[other].append((count, device))

    def _missing(self, number: int) -> Progress | None:
        """Compute a task's end; if that is not possible yet, return the progress that it waits for.

        Device −1 means that the task waits for itself.
        """
        for each in self._before(number):
            if self.task_ends[each] == _IN_USE:
                return -1, 0
            missing = self._compute_task(each)
            if missing is not None:
                return missing
        return None

    def _before(self, number: int) -> Iterator[int]:
        """The tasks of its order that are not computed, and then the task itself."""
        chain: list[int] = []
        at: int | None = number
        while at is not None and (self.task_ends[at] is None or self.task_ends[at] == _IN_USE):
            chain.append(at)
            at = self._ahead[at]
        return reversed(chain)

    def _compute_task(self, number: int) -> Progress | None:
        """As `_missing`, for a task after the one before it in its order."""
        task, ahead = self._tasks[number], self._ahead[number]
        start = 0.0 if ahead is None else self.task_ends[ahead] or 0.0
        self.task_ends[number] = _IN_USE
        for item in task.items:
            ends = self.ends[item.device]
            missing = (item.device, item.issued) if len(ends) < item.issued else None
            for other in item.waits if missing is None else ():
                missing = missing or self._missing(other)
                start = max(start, self.task_ends[other] or 0.0)
            if missing is not None:
                self.task_ends[number] = None
                return missing
            if item.issued:
                start = max(start, ends[item.issued - 1])
        self.task_ends[number] = start + self._task_s[number]
        return None


def run_alone(
    plan: Plan,
    queues: Queues,
    costs: Sequence[StageCosts],
    hop: Callable[[int, int], tuple[float, float]],
    task_s: Sequence[float],
    *,
    eager: bool = False,
    limit: AheadLimit | None = None,
) -> Engine | None:
    """The step of a plan in which each queue of messages has links of its own.

    Args:
        plan: the plan.
        queues: of the lowered plan; of one replica: all run the same orders.
        costs: per stage.
        hop: latency in seconds, and bytes/s, from one device to another.
        task_s: duration of each task in seconds.
        eager: a send needs no posted receive.
        limit: how far stages may run ahead of their readers.

    Returns:
        The engine after its run; None if the plan deadlocks.
    """
    if _read_too_early(plan, queues) is not None:
        return None
    engine = _engine(queues, costs, hop, task_s, eager, limit)
    return engine if engine.run() else None


def _engine(
    queues: Queues,
    costs: Sequence[StageCosts],
    hop: Callable[[int, int], tuple[float, float]],
    task_s: Sequence[float],
    eager: bool = False,
    limit: AheadLimit | None = None,
) -> Engine:
    seconds = compute_times(queues.compute, costs)
    engine = Engine(queues.compute, seconds, queues.tasks, task_s)
    for pair, messages in queues.messages.items():
        engine.queue(*pair, messages, hop(*pair), eager=eager)
    if limit is not None:
        engine.limit_ahead(limit)
    return engine


def _nothing(plan: Plan) -> list[StageCosts]:
    return [StageCosts(0.0, 0.0, 0.0)] * len(plan.stages)


def _at_once(_: int, __: int) -> tuple[float, float]:
    return 0.0, float("inf")


def run_without_times(plan: Plan, queues: Queues, limit: AheadLimit | None = None) -> Engine | None:
    """As `run_alone`, if everything takes no time."""
    return run_alone(plan, queues, _nothing(plan), _at_once, [0.0] * len(queues.tasks), limit=limit)


def report_deadlock(plan: Plan, queues: Queues) -> NoReturn:
    """Report the cycle of waits of a plan that does not run to its end.

    Raises:
        RequestError: always.
    """
    early = _read_too_early(plan, queues)
    if early is not None:
        refuse_early(*early)
    engine = _engine(queues, _nothing(plan), _at_once, [0.0] * len(queues.tasks))
    engine.run()
    refuse_cycle(engine.cycle())


def refuse_cycle(waits: Sequence[str], what: str = "plan") -> NoReturn:
    """Raise a RequestError with a cycle of waits; ``what`` names the orders."""
    raise RequestError(f"the {what} deadlocks: {', '.join(waits)}; change the order of one of them")


def refuse_early(reader: Action, source: Action, what: str = "plan") -> NoReturn:
    """Raise a RequestError for an action that reads what a later one of its device computes."""
    refuse_cycle([f"{reader} waits for {source} ({READS})", f"{source} waits for {reader} (runs after it)"], what)


def _read_too_early(plan: Plan, queues: Queues) -> tuple[Action, Action] | None:
    """An action that reads the tensors of a stage of its own device, for which there is no message, before they exist;
    and the action that computes them."""
    passed = [edge for edge in plan.edges if plan.placement[edge.src] == plan.placement[edge.dst]]
    devices = {plan.placement[edge.src] for edge in passed}
    at = {device: computed_at(queues.compute[device]) for device in devices}
    for edge in passed:
        forward, backward = at[plan.placement[edge.src]]
        for microbatch in range(plan.microbatches):
            pairs = [(forward[edge.dst, microbatch], forward[edge.src, microbatch])]
            if edge.gradient_bytes > 0:
                pairs.append((backward[edge.src, microbatch], backward[edge.dst, microbatch]))
            actions = queues.compute[plan.placement[edge.src]]
            for reader, source in pairs:
                if reader < source:
                    return actions[reader], actions[source]
    return None
