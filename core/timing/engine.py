"""The engine: when each item of a step runs, where no two queues share a link; and which waits are circular.

The items of a step are compute items, messages and tasks (``core/plan/items.py``), in queues that run in order. An item
starts when the item before it in its queue has ended, and all that it waits for::

    device 0      0F0 ─ 0F1 ─ 0F2 ·········· 0B0      a queue runs until an item waits for one of another queue, and
    messages         └▶[0F0>1]    ┌─▶[1B0>0]─▲        continues when that has ended
    device 1                └▶1F0 ─ 1B0

1. An input is a pure delay after the item that computes it (``read``), or the arrival of a message.
2. A message waits for its send, for its receive to be posted, and for the message before it to have drained. It arrives
   one latency after it has drained.
3. A task waits for each of its items to be issued, and for the tasks that its items wait for; its readers wait for it.

It is the only computation of times that knows every policy: validation, the planner's own score of a plan, and the
evaluation of schedules run it. `compiled` has the same rules for compute orders inside searches, `contended` adds
shared links, and the simulator is independent of all three.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NoReturn

from ..costs.costs import Compute
from ..errors import RequestError
from ..plan.items import Message, Task

Hop = Callable[[int, int], tuple[float, float]]
"""(sending device, receiving device) → latency in seconds, and bytes/s."""
Operations = tuple[tuple[Sequence[float], Sequence[float]], ...]
"""Per device the starts and the ends of its compute items."""

_READS = "reads its output"
_NOT_YET = -1.0


def at_once(_: int, __: int) -> tuple[float, float]:
    """Links on which messages take no time (a :data:`Hop`)."""
    return 0.0, float("inf")


class Engine:
    """One step: the times of all items, in seconds, as far as they are computed.

    Args:
        messages: the queue of every ordered pair of devices.
        hop: of the links of each queue.
    """

    def __init__(
        self,
        compute: Compute,
        seconds: Sequence[Sequence[float]],
        messages: Mapping[tuple[int, int], Sequence[Message]] | None = None,
        hop: Hop = at_once,
        tasks: Sequence[Task] = (),
        task_s: Sequence[float] = (),
    ) -> None:
        # Items are numbered: those of device 0, device 1, …, the messages of each pair, the tasks.
        self._compute, self._tasks, self._messages = compute, tasks, messages or {}
        self._first = [0, *accumulate(map(len, compute))]
        self._seconds = [each for own in seconds for each in own]
        self._queues: list[Sequence[int]] = [range(*pair) for pair in zip(self._first, self._first[1:], strict=False)]
        self._waits: list[tuple[tuple[int, float], ...]] = [()] * self._first[-1]
        """Per item what it waits for: places in ``_times``, each with a delay from then on."""
        self._pairs: dict[tuple[int, int], tuple[int, float]] = {}  # number of its first message, and latency
        for pair, queue in self._messages.items():
            self._add_messages(pair, queue, *hop(*pair))
        self._add_tasks(task_s)
        self._times = [_NOT_YET] * (2 * len(self._waits))
        """The end of every item, and from the back, at ~item, its start."""
        self._order: list[int] = []  # the items in an order in which all that they wait for comes first

    def _add_messages(
        self, pair: tuple[int, int], queue: Sequence[Message], latency_s: float, bytes_per_s: float
    ) -> None:
        (src, dst), waits, first = pair, self._waits, len(self._waits)
        sender, receiver = self._first[src], self._first[dst]
        self._pairs[pair] = first, latency_s
        for number, (_, _, _, _, size, issued, posted, reader) in enumerate(queue, first):
            sent = (sender + issued, 0.0)
            waits.append((sent, (receiver + posted - 1, 0.0)) if posted else (sent,))
            seconds = size / bytes_per_s
            self._seconds.append(seconds)
            waits[receiver + reader] += ((~number, seconds + latency_s),)  # as the simulator adds them
        self._queues.append(range(first, len(waits)))

    def _add_tasks(self, task_s: Sequence[float]) -> None:
        waits, first = self._waits, len(self._waits)
        self._first_task = first
        orders: dict[object, list[int]] = {}
        for number, task in enumerate(self._tasks, first):
            issued = ((self._first[item.device] + item.issued - 1, 0.0) for item in task.items if item.issued)
            waits.append((*issued, *((first + other, 0.0) for item in task.items for other in item.waits)))
            orders.setdefault(number if task.order is None else task.order, []).append(number)
            for device, position in task.readers:
                waits[self._first[device] + position] += ((number, 0.0),)
        self._seconds += task_s
        self._queues += orders.values()

    def read(self, device: int, source: int, pairs: Iterable[tuple[int, int]], delay_s: float) -> None:
        """Let items of a device wait until some time after items of another one have ended.

        Args:
            device, source: the device that waits, and the other one.
            pairs: the position of an item that waits, and that of the other one.
            delay_s: from its end on.
        """
        own, other, waits = self._first[device], self._first[source], self._waits
        for position, issued in pairs:
            waits[own + position] += ((other + issued, delay_s),)

    @property
    def operations(self) -> Operations:
        """Per device the starts and the ends of its compute items."""
        return self._of_devices(self._times)

    def _of_devices(self, times: Sequence[float]) -> Operations:
        bounds = zip(self._first, self._first[1:], strict=False)
        return tuple((times[~a:~b:-1], times[a:b]) for a, b in bounds)

    @property
    def arrivals(self) -> dict[tuple[int, int], list[float]]:
        """Per ordered pair of devices when each message of its queue has arrived."""
        return {
            pair: [self._times[~at] + (self._seconds[at] + latency_s) for at in range(first, first + len(queue))]
            for (pair, (first, latency_s)), queue in zip(self._pairs.items(), self._messages.values(), strict=True)
        }

    @property
    def task_ends(self) -> list[float]:
        """The end of each task."""
        return self._times[self._first_task : len(self._waits)]

    @property
    def step_s(self) -> float:
        """When everything has ended."""
        return max([*self._times[: self._first[-1]], *self.task_ends], default=0.0)

    def run(self) -> bool:
        """Run all queues; whether the step runs to its end."""
        waiting: dict[int, list[Iterator[int]]] = {}
        ready: list[Iterator[int]] = []
        ready += [self._work(queue, waiting, ready) for queue in reversed(self._queues)]
        while ready:
            queue = ready.pop()
            source = next(queue, None)
            if source is not None:
                waiting.setdefault(source, []).append(queue)
        return not waiting

    def _work(
        self, queue: Iterable[int], waiting: dict[int, list[Iterator[int]]], ready: list[Iterator[int]]
    ) -> Iterator[int]:
        """Run the items of a queue, and make those ready that wait for them; yield the item that it waits for."""
        waits, seconds, times, order, now = self._waits, self._seconds, self._times, self._order, 0.0
        for item in queue:
            start = now
            for source, delay in waits[item]:
                while times[source] < 0:
                    yield source if source >= 0 else ~source
                time = times[source] + delay
                if time > start:  # noqa: PLR1730 - max() costs a tenth of the whole pass
                    start = time
            times[~item] = start
            times[item] = now = start + seconds[item]
            order.append(item)
            if item in waiting:
                ready += waiting.pop(item)

    def latest(self) -> Operations:
        """The latest starts and ends of compute items with which no device ends later, after a run without messages and
        tasks."""
        times, latest = self._times, [float("inf")] * len(self._times)
        last = {queue[-1] for queue in self._queues if queue}
        for item in reversed(self._order):
            end = min(latest[item], times[item] if item in last else latest[~(item + 1)])
            latest[~item], latest[item] = end - (times[item] - times[~item]), end
            for source, delay_s in self._waits[item]:
                latest[source] = min(latest[source], latest[~item] - delay_s)
        return self._of_devices(latest)

    def cycle(self) -> list[str]:
        """The waits of a step that does not run to its end: from a blocked device to the one that it waits for, until
        one recurs."""
        heads: dict[int, int] = {}  # item that has not run → the first such item of its queue
        for queue in self._queues:
            left = [item for item in queue if self._times[item] < 0]
            heads.update(dict.fromkeys(left, left[0]) if left else {})
        stuck = next((head for item, head in heads.items() if item < self._first[-1]), None)
        path: list[tuple[int, int | None, str]] = []
        while stuck is not None and stuck not in (item for item, _, _ in path):
            wanted, why = self._wanted(stuck, heads)
            path.append((stuck, wanted, why))
            stuck = None if wanted is None else heads[wanted]
        recurs = next((at for at, (item, _, _) in enumerate(path) if item == stuck), len(path) - 1)
        waits = []
        for item, wanted, why in path[recurs:]:
            if wanted is None:
                waits.append(f"{self._name(item)} waits for itself ({why})")
                continue
            waits.append(f"{self._name(item)} waits for {self._name(wanted)} ({why})")
            if wanted != heads[wanted]:
                waits.append(f"{self._name(wanted)} waits for {self._name(heads[wanted])} (runs after it)")
        return waits or ["its tasks after the last compute action wait for each other"]

    def _wanted(self, stuck: int, heads: Mapping[int, int]) -> tuple[int | None, str]:
        """The compute item that a stuck item waits for, over messages and tasks, and why; None if it is itself."""
        item, seen, why = stuck, set[int](), ""
        while item not in seen:
            seen.add(item)
            sources = (source if source >= 0 else ~source for source, _ in self._waits[item])
            source = next((each for each in sources if each in heads), heads[item])
            if not why:
                why = self._tasks[source - self._first_task].reason if source >= self._first_task else _READS
            if source < self._first[-1]:
                return source, why
            item = source
        return None, why

    def _name(self, item: int) -> str:
        device = bisect_right(self._first, item) - 1
        return str(self._compute[device][item - self._first[device]])


def refuse_cycle(engine: Engine, what: str = "plan") -> NoReturn:
    """Raise a RequestError with the cycle of waits of a step that does not end; ``what`` names its orders."""
    raise RequestError(f"the {what} deadlocks: {', '.join(engine.cycle())}; change the order of one of them")
