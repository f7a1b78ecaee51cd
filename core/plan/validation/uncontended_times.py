"""The times of a step without contention, in which no two queues share a link; they also show whether it deadlocks.

Each device runs its compute items until an input is missing; the device that it waits for resumes it::

    device 0   0F0  0F1  0F2 ·············  runs until its first backward, which waits for device 1
    device 1        1F0  1B0 1F1 ·········  runs until it needs the message after 0F2, and so on

A message is computed when its reader is reached: both ends of a queue have one order, so its receive and those of the
messages before it are posted by then, and only the sender may be late. Nothing is stored for the dependencies
themselves (`progress` has them as a graph), so that the pass is also fit for plans of a million actions.
"""

from collections.abc import Callable, Iterator, Sequence

from attrs import frozen

from ...costs.costs import StageCosts
from ..items import Message, Task
from ..kinds import compute_times
from ..message_matching import computed_at
from ..plan import Plan
from ..queues import Queues

Progress = tuple[int, int]
"""A device, and how many of its compute items have ended."""

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
    if not _reads_own_results_in_order(plan, queues):
        return None
    step = _Step(queues, compute_times(queues.compute, costs), hop, task_s, eager)
    return step.times() if step.run() else None


def _reads_own_results_in_order(plan: Plan, queues: Queues) -> bool:
    """Whether a stage that reads the tensors of another stage of its device runs after it: no message is in between."""
    passed = [edge for edge in plan.edges if plan.placement[edge.src] == plan.placement[edge.dst]]
    devices = {plan.placement[edge.src] for edge in passed}
    at = {device: computed_at(queues.compute[device]) for device in devices}
    for edge in passed:
        forward, backward = at[plan.placement[edge.src]]
        for microbatch in range(plan.microbatches):
            if forward[edge.src, microbatch] > forward[edge.dst, microbatch]:
                return False
            if edge.gradient_bytes > 0 and backward[edge.dst, microbatch] > backward[edge.src, microbatch]:
                return False
    return True


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
            row = reads[position]
            if row is not None:
                for channel, count in row:
                    arrivals = channel.arrivals
                    if len(arrivals) < count:
                        sent, issued = all_ends[channel.src], channel.messages[count - 1].issued
                        if len(sent) <= issued:
                            self.waiting[channel.src].append((issued + 1, device))
                            return
                        channel.advance(count, sent, ends)
                    start = max(start, arrivals[count - 1])
            if position in fences:
                for task in fences[position]:
                    missing = self._missing(task)
                    if missing is not None:
                        if missing[0] >= 0:
                            self.waiting[missing[0]].append((missing[1], device))
                        return
                    start = max(start, self.task_ends[task] or 0.0)
            starts.append(start)
            now = start + seconds[position]
            ends.append(now)

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
