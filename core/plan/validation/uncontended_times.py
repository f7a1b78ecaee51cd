"""The times of a step without contention, in which no two queues share a link; they also show whether it deadlocks, and
in which cycle of waits.

Each device runs its compute items until an input is missing; the device that it waits for resumes it::

    device 0   0F0  0F1  0F2 ·············  runs until its first backward, which waits for device 1
    device 1        1F0  1B0 1F1 ·········  runs until it needs the message after 0F2, and so on

A message is computed when its reader is reached: both ends of a queue have one order, so its receive and those of the
messages before it are posted by then, and only the sender may be late. Nothing is stored for the dependencies
themselves, so that the pass is also fit for plans of a million actions.

What waits for what (``core/plan/items.py``):

1. a compute item waits for the one before it on its device, and for its inputs;
2. a message waits for its send (the compute item before that), for its receive to be posted (likewise), and for the
   message before it in its queue;
3. a task waits for each of its items to be issued (the compute item before that), for the tasks that its items wait
   for, and for the task before it in its order; its readers wait for it;
4. where a limit is given on how far a stage runs ahead of its readers (see `backpressure`), F waits for the transfer of
   the stage's output that many microbatches before, to each of its readers.

All replicas run the same orders, so one of them is checked.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from attrs import frozen

from ...actions import Action, Kind
from ...costs.costs import StageCosts
from ...errors import RequestError
from ..items import Message, Task
from ..kinds import compute_times
from ..message_matching import computed_at
from ..plan import Plan
from ..queues import Queues

Progress = tuple[int, int]
"""A device, and how many of its compute items have ended."""

AheadLimit = Callable[[int, int], int]
"""(stage, reader) → how many microbatches the stage may run ahead of the transfers to that reader."""

_AHEAD = "may not run further ahead of it"
_IN_USE = -1.0
"""End of a task while its conditions are being computed: a task that waits for itself never ends."""


@frozen
class UncontendedQueue:
    """Times of the messages from one device to another, in order, in seconds.

    Args:
        ready: when each message was sent and its receive was posted.
        starts: when its transfer started: later than ``ready`` if the previous message was still being sent.
        arrivals: when it arrived.
    """

    ready: list[float]
    starts: list[float]
    arrivals: list[float]


@frozen
class UncontendedTimes:
    """Times of a step in which no link is shared, in seconds.

    Args:
        operations: per device the starts and the ends of its operations.
        queues: per ordered pair of devices its messages.
        in_turn: whether a message waited for the one before it in its queue.
    """

    operations: tuple[tuple[list[float], list[float]], ...]
    queues: dict[tuple[int, int], UncontendedQueue]
    in_turn: bool

    @property
    def arrivals(self) -> dict[tuple[int, int], list[float]]:
        """Per ordered pair of devices when each message has arrived."""
        return {pair: queue.arrivals for pair, queue in self.queues.items()}


def uncontended_times(
    plan: Plan,
    queues: Queues,
    costs: Sequence[StageCosts],
    hop: Callable[[int, int], tuple[float, float]],
    task_s: Callable[[Task], float],
    *,
    eager: bool = False,
) -> UncontendedTimes | None:
    """The times of a step in which no two queues share a link.

    Args:
        plan: the plan.
        queues: of the lowered plan.
        costs: per stage.
        hop: latency in seconds, and bytes/s, from one device to another.
        task_s: duration of a task in seconds.
        eager: a send needs no posted receive.

    Returns:
        The times; None if the plan deadlocks.
    """
    if _read_too_early(plan, queues) is not None:
        return None
    step = _Step(queues, compute_times(queues.compute, costs), hop, task_s, eager)
    return step.times() if step.run() else None


def runs_to_its_end(plan: Plan, queues: Queues, limit: AheadLimit) -> bool:
    """Whether a plan has no deadlock if stages run ahead of their readers up to a limit."""
    return _read_too_early(plan, queues) is None and _without_times(plan, queues, limit).run()


def report_deadlock(plan: Plan, queues: Queues) -> NoReturn:
    """Report the cycle of waits of a plan for which there are no `uncontended_times`.

    Raises:
        RequestError: always.
    """
    early = _read_too_early(plan, queues)
    if early is not None:
        reader, source = early
        waits = [f"{reader} waits for {source} (reads its output)", f"{source} waits for {reader} (runs after it)"]
    else:
        step = _without_times(plan, queues)
        step.run()
        waits = step.cycle()
    raise RequestError(f"the plan deadlocks: {', '.join(waits)}; change the order of one of them")


def _without_times(plan: Plan, queues: Queues, limit: AheadLimit | None = None) -> "_Step":
    """The step if everything takes no time."""
    seconds = compute_times(queues.compute, [StageCosts(0.0, 0.0, 0.0)] * len(plan.stages))
    return _Step(queues, seconds, lambda *_: (0.0, float("inf")), lambda _: 0.0, False, limit)


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


class _Channel:
    """The messages from one device to another, computed in order."""

    __slots__ = (
        "arrivals", "bytes_per_s", "dst", "eager", "free_s", "in_turn", "latency_s", "messages", "ready", "src",
        "starts",
    )  # fmt: skip

    def __init__(self, src: int, dst: int, messages: Sequence[Message], hop: tuple[float, float], eager: bool) -> None:
        self.src, self.dst, self.messages, self.eager = src, dst, messages, eager
        self.latency_s, self.bytes_per_s = hop
        self.ready: list[float] = []
        self.starts: list[float] = []
        self.arrivals: list[float] = []
        self.free_s = 0.0
        self.in_turn = False

    def advance(self, count: int, sent: Sequence[float], run: Sequence[float]) -> None:
        """Compute the first ``count`` messages, from the ends of the sender's and of the receiver's compute items."""
        latency_s, bytes_per_s, free_s, eager = self.latency_s, self.bytes_per_s, self.free_s, self.eager
        for _, _, _, _, size, issued, posted, _ in self.messages[len(self.arrivals) : count]:
            start = sent[issued]
            if posted and not eager and run[posted - 1] > start:
                start = run[posted - 1]
            self.ready.append(start)
            if free_s > start:
                start, self.in_turn = free_s, True
            seconds = size / bytes_per_s
            free_s = start + seconds
            self.starts.append(start)
            self.arrivals.append(start + (seconds + latency_s))  # as the simulator adds them
        self.free_s = free_s


class _Step:
    """One step: the times of compute items, messages and tasks, as far as they are computed."""

    def __init__(
        self,
        queues: Queues,
        seconds: Sequence[Sequence[float]],
        hop: Callable[[int, int], tuple[float, float]],
        task_s: Callable[[Task], float],
        eager: bool,
        limit: AheadLimit | None = None,
    ) -> None:
        self.queues, self.seconds, self.task_s = queues, seconds, task_s
        self.starts: list[list[float]] = [[] for _ in queues.compute]
        self.ends: list[list[float]] = [[] for _ in queues.compute]
        self.channels = {
            pair: _Channel(*pair, messages, hop(*pair), eager) for pair, messages in queues.messages.items()
        }
        self.reads: list[list[list[tuple[_Channel, int]] | None]] = [[None] * len(own) for own in queues.compute]
        for channel in self.channels.values():
            rows = self.reads[channel.dst]
            for count, message in enumerate(channel.messages, 1):
                row = rows[message.reader]
                if row is None:
                    rows[message.reader] = [(channel, count)]
                else:
                    row.append((channel, count))
        self.ahead_of: list[dict[int, list[tuple[_Channel, int]]]] = [{} for _ in queues.compute]
        if limit is not None:
            self._limit_ahead(limit)
        self.fences: list[dict[int, list[int]]] = [{} for _ in queues.compute]
        self.ahead: list[int | None] = []
        latest: dict[tuple[str, int], int] = {}
        for number, task in enumerate(queues.tasks):
            for device, position in task.readers:
                self.fences[device].setdefault(position, []).append(number)
            self.ahead.append(None if task.order is None else latest.get(task.order))
            if task.order is not None:
                latest[task.order] = number
        self.task_ends: list[float | None] = [None] * len(queues.tasks)
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in queues.compute]  # (count of items, device that waits)
        self.blocked: list[tuple[int, int, str]] = [(-1, 0, "")] * len(queues.compute)
        """Per device what it waited for last: a device (−1: a task that waits for itself), its count of items, why."""

    def _limit_ahead(self, limit: AheadLimit) -> None:
        """Let forwards wait until their stage is no longer too far ahead of its readers."""
        forwards = {
            (action.stage, action.microbatch): position
            for actions in self.queues.compute
            for position, action in enumerate(actions)
            if action.kind is Kind.F
        }
        for channel in self.channels.values():
            for count, message in enumerate(channel.messages, 1):
                stage, reader, microbatch = message.send.stage, message.send.peer, message.send.microbatch
                if message.send.kind is Kind.SEND_F and reader is not None and microbatch is not None:
                    later = forwards.get((stage, microbatch + limit(stage, reader)))
                    if later is not None:
                        self.ahead_of[channel.src].setdefault(later, []).append((channel, count))

    def cycle(self) -> list[str]:
        """The waits of a step that does not run to its end: from a blocked device to the one that it waits for, until
        one recurs."""
        device = next((at for at, own in enumerate(self.ends) if len(own) < len(self.seconds[at])), -1)
        path: list[int] = []
        while device >= 0 and device not in path:
            path.append(device)
            device = self.blocked[device][0]
        waits = []
        for at in path[path.index(device) :] if device in path else path[-1:]:
            other, count, why = self.blocked[at]
            actions, stuck = self.queues.compute[at], len(self.ends[at])
            if other < 0:
                waits.append(f"{actions[stuck]} waits for itself ({why})")
                continue
            wanted, now = self.queues.compute[other][count - 1], self.queues.compute[other][len(self.ends[other])]
            waits.append(f"{actions[stuck]} waits for {wanted} ({why})")
            if wanted != now:
                waits.append(f"{wanted} waits for {now} (runs after it)")
        return waits or ["its tasks after the last compute action wait for each other"]

    def run(self) -> bool:
        """Run all devices; whether the step runs to its end."""
        ready = list(range(len(self.ends)))
        while ready:
            device = ready.pop()
            self._advance(device)
            done, still = len(self.ends[device]), []
            for count, other in self.waiting[device]:
                if done >= count:
                    ready.append(other)
                else:
                    still.append((count, other))
            self.waiting[device] = still
        if any(len(own) < len(seconds) for own, seconds in zip(self.ends, self.seconds, strict=True)):
            return False
        return all(self._missing(task) is None for task in range(len(self.task_ends)))

    def times(self) -> UncontendedTimes:
        """The times of a step that has run to its end."""
        return UncontendedTimes(
            tuple(zip(self.starts, self.ends, strict=True)),
            {
                pair: UncontendedQueue(channel.ready, channel.starts, channel.arrivals)
                for pair, channel in self.channels.items()
            },
            any(channel.in_turn for channel in self.channels.values()),
        )

    def _advance(self, device: int) -> None:
        """Run a device until it is done, or waits for another one."""
        starts, ends, fences = self.starts[device], self.ends[device], self.fences[device]
        all_ends, reads, seconds = self.ends, self.reads[device], self.seconds[device]
        now = ends[-1] if ends else 0.0
        for position in range(len(ends), len(seconds)):
            start = now
            for channel, count in self.ahead_of[device].get(position, ()):
                message = channel.messages[count - 1]
                if len(ends) <= message.issued:
                    return self._wait(device, device, message.issued + 1, _AHEAD)
                if len(all_ends[channel.dst]) < message.posted:
                    return self._wait(device, channel.dst, message.posted, _AHEAD)
                channel.advance(count, ends, all_ends[channel.dst])
                start = max(start, channel.arrivals[count - 1])
            row = reads[position]
            if row is not None:
                for channel, count in row:
                    arrivals = channel.arrivals
                    if len(arrivals) < count:
                        sent, issued = all_ends[channel.src], channel.messages[count - 1].issued
                        if len(sent) <= issued:
                            return self._wait(device, channel.src, issued + 1, "reads its output")
                        channel.advance(count, sent, ends)
                    start = max(start, arrivals[count - 1])
            if position in fences:
                for task in fences[position]:
                    missing = self._missing(task)
                    if missing is not None:
                        return self._wait(device, *missing, self.queues.tasks[task].reason)
                    start = max(start, self.task_ends[task] or 0.0)
            starts.append(start)
            now = start + seconds[position]
            ends.append(now)

    def _wait(self, device: int, other: int, count: int, why: str) -> None:
        """Let a device wait until as many items of another one have ended."""
        self.blocked[device] = other, count, why
        if other >= 0:
            self.waiting[other].append((count, device))

    def _missing(self, number: int) -> Progress | None:
        """Compute a task's end; if that is not possible yet, return the progress that it waits for.

        Device −1 means that the task waits for itself.
        """
        for each in self._before(number):
            if self.task_ends[each] == _IN_USE:
                return -1, 0
            missing = self._compute(each)
            if missing is not None:
                return missing
        return None

    def _before(self, number: int) -> Iterator[int]:
        """The tasks of its order that are not computed, and then the task itself."""
        chain: list[int] = []
        at: int | None = number
        while at is not None and (self.task_ends[at] is None or self.task_ends[at] == _IN_USE):
            chain.append(at)
            at = self.ahead[at]
        return reversed(chain)

    def _compute(self, number: int) -> Progress | None:
        """As `_missing`, for a task after the one before it in its order."""
        task, ahead = self.queues.tasks[number], self.ahead[number]
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
        self.task_ends[number] = start + self.task_s(task)
        return None
