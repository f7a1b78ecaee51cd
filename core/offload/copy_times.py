"""When copies to the host and back run, for a compute order whose times are known, and what they wait for.

1. Order: each host-copy queue is simulated in time. A reload may start at the latest so that it, and all reloads after
   it, end before their backwards start. An offload whose F has ended runs first if it ends by then; otherwise the
   reload runs early. So the queue never idles while an offload is ready, and reloads are as late as that allows.
2. Positions: a reload is issued after the last compute action that ends before its copy starts, and never after the F
   of an offload that follows it in the queue.
3. Fences: the queues run again, as the device runs them, in the order of issue (`HostQueue`). The device
   memory is free from the first compute action on that starts after the end of the copy out.

A microbatch whose tensors would then be on the host for no time is not copied.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from attrs import define, frozen

from ..plan.memory_policy import TimedCopy
from ..timing.coding import INFINITY

ROUNDING = 1e-9
"""Share of the order's time below which two times are equal."""


class Stay(NamedTuple):
    """Saved tensors of one microbatch, from the end of F to the start of the backward that reads them.

    Args:
        forward, reader: positions of F, and of B or I, in the device's compute order.
        out_s, back_s: seconds of the copies to the host and back.
        bytes: size of the offloaded storages.
    """

    forward: int
    reader: int
    out_s: float
    back_s: float
    bytes: float


@frozen
class Clock:
    """Start and end of every action of one device's compute order."""

    starts: Sequence[float]
    ends: Sequence[float]

    @property
    def tolerance(self) -> float:
        """Seconds below which two times are equal."""
        return ROUNDING * self.ends[-1] if self.ends else 0.0


def plan_copies(clock: Clock, stays: Sequence[Stay], queues: int = 1) -> list[TimedCopy | None]:
    """The copies of every stay; None where it is shorter than the round trip, or the queue has no time for it.

    Args:
        clock: times of the compute order without copies.
        queues: host-copy queues of the device: 1 for both directions, or 2.
    """
    found: list[TimedCopy | None] = [None] * len(stays)
    left = [number for number, stay in enumerate(stays) if long_enough(clock, stay)]
    while left:
        timed = _timed(clock, stays, left, queues)
        late = [number for number in left if timed[number] is None]
        if not late:
            for number in left:
                found[number] = timed[number]
            break
        # Every second one is dropped: without these the queue may have time for the others.
        late.sort(key=lambda number: (stays[number].forward, number))
        dropped = set(late[::2])
        left = [number for number in left if number not in dropped]
    return found


def long_enough(clock: Clock, stay: Stay) -> bool:
    """Whether saved tensors stay at least as long as their round trip takes."""
    gap = clock.starts[stay.reader] - clock.ends[stay.forward]
    return stay.reader - stay.forward > 1 and gap >= (stay.out_s + stay.back_s) * (1 - ROUNDING)


def _timed(clock: Clock, stays: Sequence[Stay], left: Sequence[int], queues: int) -> dict[int, TimedCopy | None]:
    """The copies of some stays when exactly these are copied."""
    positions = _issue_positions(clock, stays, _planned(clock, stays, left, queues), queues)
    found: dict[int, TimedCopy | None] = dict.fromkeys(left)
    issued = {
        number: TimedCopy(stays[number].forward, last, last, *stays[number][1:])
        for number, last in positions.items()
        if last > stays[number].forward
    }
    host = HostQueue(list(issued.values()), queues)
    for position, end in enumerate(clock.ends):
        host.issue(position, end)
    for (number, copy), (out_end, _) in zip(issued.items(), host.ends, strict=True):
        freed = max(bisect_left(clock.starts, out_end - clock.tolerance), copy.forward + 1)
        if freed <= copy.reload_after:
            found[number] = copy._replace(freed_at=freed)
    return found


class _Copy(NamedTuple):
    """A planned copy: its start, whether it is a reload, and the number of its stay."""

    start_s: float
    reload: bool
    number: int


@define
class _Queue:
    """One in-order queue while it is planned: its copies by direction, those planned, and when it is free."""

    outs: list[int]
    backs: list[int]
    planned_outs: int = 0
    planned_backs: int = 0
    free_s: float = 0.0


def _planned(clock: Clock, stays: Sequence[Stay], left: Sequence[int], queues: int) -> list[_Copy]:
    """The copies in the order in which they should run (see the module, step 1)."""
    latest = _latest_starts(clock, stays, left)
    outs = sorted(left, key=lambda number: stays[number].forward)
    backs = sorted(left, key=lambda number: stays[number].reader)
    planned = [_Queue(outs, backs)] if queues == 1 else [_Queue(outs, []), _Queue([], backs)]
    out_ends: dict[int, float] = {}
    result: list[_Copy] = []
    for _ in range(2 * len(left)):
        copy, queue = min(
            ((copy, queue) for queue in planned if (copy := _next(clock, stays, queue, latest, out_ends))),
            key=lambda each: each[0],
        )
        stay = stays[copy.number]
        end = copy.start_s + (stay.back_s if copy.reload else stay.out_s)
        queue.free_s = end
        if copy.reload:
            queue.planned_backs += 1
        else:
            queue.planned_outs += 1
            out_ends[copy.number] = end
        result.append(copy)
    return result


def _latest_starts(clock: Clock, stays: Sequence[Stay], left: Sequence[int]) -> dict[int, float]:
    """The latest start of every reload with which it and all later ones end before their readers start."""
    deadline = {number: clock.starts[stays[number].reader] for number in left}
    latest, found = INFINITY, {}
    for number in sorted(left, key=lambda number: -deadline[number]):
        found[number] = latest = min(deadline[number], latest) - stays[number].back_s
    return found


def _next(
    clock: Clock, stays: Sequence[Stay], queue: _Queue, latest: dict[int, float], out_ends: dict[int, float]
) -> _Copy | None:
    """The copy that a queue should run next, and when; None while it waits for another queue or has none left."""
    out = queue.outs[queue.planned_outs] if queue.planned_outs < len(queue.outs) else None
    back = queue.backs[queue.planned_backs] if queue.planned_backs < len(queue.backs) else None
    ready = INFINITY
    if out is not None:
        stay = stays[out]
        ready = max(queue.free_s, clock.ends[stay.forward])
        if back not in out_ends or ready + stay.out_s <= latest[back] + clock.tolerance:
            return _Copy(ready, False, out)
    if back is None or back not in out_ends:
        return None
    return _Copy(max(queue.free_s, out_ends[back], min(latest[back], ready)), True, back)


def _issue_positions(clock: Clock, stays: Sequence[Stay], planned: Sequence[_Copy], queues: int) -> dict[int, int]:
    """Per stay the position after which its reload is issued."""
    found, last = {}, len(clock.ends)
    for copy in reversed(planned):
        stay = stays[copy.number]
        if copy.reload:
            own = bisect_right(clock.ends, copy.start_s + clock.tolerance) - 1
            last = found[copy.number] = min(own, stay.reader - 1, last)
        elif queues == 1:
            last = min(last, stay.forward)
    return found


def waits_s(clock: Clock, copies: Sequence[TimedCopy], queues: int = 1) -> float:
    """How much later a device's compute order ends because it waits for copies, if all inputs arrive as before.

    Args:
        clock: the order's times without copies.
        queues: its host-copy queues.
    """
    host, now = HostQueue(copies, queues), 0.0
    for position, (start, end) in enumerate(zip(clock.starts, clock.ends, strict=True)):
        now = max(start, now, host.ready_s(position)) + end - start
        host.issue(position, now)
    return now - clock.ends[-1] if clock.ends else 0.0


class HostQueue:
    """Runs the copies of a device concurrently with its compute order.

    Args:
        copies: in any order.
        queues: 1 for both directions, or 2, one for each.
    """

    def __init__(self, copies: Sequence[TimedCopy], queues: int = 1) -> None:
        self._copies = copies
        self._free = [0.0] * queues
        self._ends = [[0.0, 0.0] for _ in copies]  # of the copy out and of the copy back
        self._awaited: dict[int, list[tuple[int, int]]] = {}
        issued: dict[int, list[tuple[bool, int, int]]] = {}
        for number, copy in enumerate(copies):
            self._awaited.setdefault(copy.freed_at, []).append((number, 0))
            self._awaited.setdefault(copy.reader, []).append((number, 1))
            issued.setdefault(copy.forward, []).append((True, copy.freed_at, number))
            issued.setdefault(copy.reload_after, []).append((False, copy.reader, number))
        self._issued = {position: sorted(found) for position, found in issued.items()}

    @property
    def ends(self) -> Sequence[Sequence[float]]:
        """Per copy when it ends on the host, and when it ends back on the device."""
        return self._ends

    def ready_s(self, position: int) -> float:
        """When all copies have ended that the action at a position waits for."""
        return max((self._ends[number][way] for number, way in self._awaited.get(position, ())), default=0.0)

    def issue(self, position: int, end_s: float) -> None:
        """Run the copies that the end of the action at a position issues."""
        for out, _, number in self._issued.get(position, ()):
            copy, ends = self._copies[number], self._ends[number]
            queue = 0 if out else -1
            if out:
                ends[0] = self._free[queue] = max(self._free[queue], end_s) + copy.out_s
            else:
                ends[1] = self._free[queue] = max(self._free[queue], end_s, ends[0]) + copy.back_s
