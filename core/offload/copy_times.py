"""When copies to the host and back run, for a compute order whose times are known, and what they wait for.

1. Order: each host-copy queue is simulated in time. A reload may start at the latest so that it, and all reloads after
   it, end before their backwards start. An offload whose F has ended runs first if it ends by then; otherwise the
   reload runs early. So the queue never idles while an offload is ready, and reloads are as late as that allows.
2. Positions: a reload is issued after the last compute action that ends before its copy starts, and never after the F
   of an offload that follows it in the queue.
3. Fences: the queues run again, as the devices run them, in the order of issue. The device memory is free from the
   first compute action on that starts after the end of the copy out.

A microbatch whose tensors would then be on the host for no time is not copied. Devices whose copies cross one link
share its rate; their copies in the same direction are then planned one after another: the devices take turns.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from attrs import define, frozen

from ..evaluate.coding import INFINITY
from ..evaluate.host_queue import HostQueue, TimedCopy

ROUNDING = 1e-9
"""Share of the order's time below which two times are equal."""


class Stay(NamedTuple):
    """Saved tensors of one microbatch, from the end of F to the start of the backward that reads them.

    Args:
        device: position of its device in the group.
        forward, reader: positions of F, and of B or I, in the device's compute order.
        out_s, back_s: seconds of the copies to the host and back on idle links.
        bytes: size of the offloaded storages.
    """

    device: int
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


@frozen
class CopyGroup:
    """Devices whose copies to the host cross one link; most often a single device.

    Args:
        clocks: of each device.
        queues: host-copy queues of a device: 1 for both directions, or 2.
        share: the shared link's rate ÷ the rate of one device's copies alone; infinite if it never limits them.
    """

    clocks: tuple[Clock, ...]
    queues: int = 1
    share: float = INFINITY

    @property
    def takes_turns(self) -> bool:
        """Whether two copies in one direction delay one another."""
        return len(self.clocks) > 1 and self.share < 2

    @property
    def tolerance(self) -> float:
        """Seconds below which two times are equal."""
        return ROUNDING * max((clock.ends[-1] for clock in self.clocks if clock.ends), default=0.0)


def plan_copies(group: CopyGroup, stays: Sequence[Stay]) -> list[TimedCopy | None]:
    """The copies of every stay; None where it is shorter than the round trip, or the queue has no time for it.

    Args:
        group: the devices, with the times of their compute orders without copies.
        stays: what to copy.
    """
    found: list[TimedCopy | None] = [None] * len(stays)
    left = [number for number, stay in enumerate(stays) if long_enough(group.clocks[stay.device], stay)]
    while left:
        timed = _timed(group, stays, left)
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


def _timed(group: CopyGroup, stays: Sequence[Stay], left: Sequence[int]) -> dict[int, TimedCopy | None]:
    """The copies of some stays when exactly these are copied."""
    positions = _issue_positions(group, stays, _planned(group, stays, left))
    issued = {number: at for number, at in positions.items() if at > stays[number].forward}
    ends = run_queues(group, stays, issued)
    tolerance = group.tolerance
    found: dict[int, TimedCopy | None] = dict.fromkeys(left)
    for number, last in issued.items():
        stay = stays[number]
        starts = group.clocks[stay.device].starts
        freed = max(bisect_left(starts, ends[number] - tolerance), stay.forward + 1)
        if freed <= last:
            found[number] = TimedCopy(stay.forward, freed, last, stay.reader, stay.out_s, stay.back_s, stay.bytes)
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


def _planned(group: CopyGroup, stays: Sequence[Stay], left: Sequence[int]) -> list[list[_Copy]]:
    """Per device its copies in the order in which they should run (see the module, step 1)."""
    latest = _latest_starts(group, stays, left)
    queues = []
    for device in range(len(group.clocks)):
        own = [number for number in left if stays[number].device == device]
        outs = sorted(own, key=lambda number: stays[number].forward)
        backs = sorted(own, key=lambda number: stays[number].reader)
        queues += [_Queue(outs, backs)] if group.queues == 1 else [_Queue(outs, []), _Queue([], backs)]
    wire = [0.0, 0.0]  # when the shared link is free, by direction
    out_ends: dict[int, float] = {}
    result: list[list[_Copy]] = [[] for _ in group.clocks]
    for _ in range(2 * len(left)):
        copy, queue = min(
            ((copy, queue) for queue in queues if (copy := _next(group, stays, queue, latest, wire, out_ends))),
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
        if group.takes_turns:
            wire[copy.reload] = end
        result[stay.device].append(copy)
    return result


def _latest_starts(group: CopyGroup, stays: Sequence[Stay], left: Sequence[int]) -> dict[int, float]:
    """The latest start of every reload with which it and all later ones end before their readers start."""
    deadline = {n: group.clocks[stays[n].device].starts[stays[n].reader] for n in left}
    device_s, wire_s = [INFINITY] * len(group.clocks), INFINITY
    found = {}
    for number in sorted(left, key=lambda number: -deadline[number]):
        stay = stays[number]
        end = min(deadline[number], device_s[stay.device], wire_s)
        found[number] = device_s[stay.device] = end - stay.back_s
        if group.takes_turns:
            wire_s = found[number]
    return found


def _next(
    group: CopyGroup,
    stays: Sequence[Stay],
    queue: _Queue,
    latest: dict[int, float],
    wire: Sequence[float],
    out_ends: dict[int, float],
) -> _Copy | None:
    """The copy that a queue should run next, and when; None while it waits for another queue or has none left."""
    out = queue.outs[queue.planned_outs] if queue.planned_outs < len(queue.outs) else None
    back = queue.backs[queue.planned_backs] if queue.planned_backs < len(queue.backs) else None
    ready = INFINITY
    if out is not None:
        stay = stays[out]
        ready = max(queue.free_s, group.clocks[stay.device].ends[stay.forward], wire[0])
        if back not in out_ends or ready + stay.out_s <= latest[back] + group.tolerance:
            return _Copy(ready, False, out)
    if back is None or back not in out_ends:
        return None
    return _Copy(max(queue.free_s, wire[1], out_ends[back], min(latest[back], ready)), True, back)


def _issue_positions(group: CopyGroup, stays: Sequence[Stay], planned: Sequence[Sequence[_Copy]]) -> dict[int, int]:
    """Per stay the position after which its reload is issued."""
    found = {}
    for clock, copies in zip(group.clocks, planned, strict=True):
        last = len(clock.ends)
        for copy in reversed(copies):
            stay = stays[copy.number]
            if copy.reload:
                own = bisect_right(clock.ends, copy.start_s + group.tolerance) - 1
                last = found[copy.number] = min(own, stay.reader - 1, last)
            elif group.queues == 1:
                last = min(last, stay.forward)
    return found


class _Issued(NamedTuple):
    """A copy in the order of its queue: the position that it follows, reloads before offloads."""

    position: int
    out: bool
    order: int
    number: int


def issue_order(stays: Sequence[Stay], issued: dict[int, int], device: int, queues: int) -> list[list[_Issued]]:
    """The copies of a device's queues in the order of their issue."""
    backs = [_Issued(at, False, stays[n].reader, n) for n, at in issued.items() if stays[n].device == device]
    outs = [_Issued(stays[each.number].forward, True, 0, each.number) for each in backs]
    return [sorted(outs + backs)] if queues == 1 else [sorted(outs), sorted(backs)]


def run_queues(group: CopyGroup, stays: Sequence[Stay], issued: dict[int, int]) -> dict[int, float]:
    """When the copy out of every stay ends, if compute actions run at the times of the clocks.

    Args:
        group: the devices.
        stays: with those that are copied in ``issued``.
        issued: per stay the position after which its reload is issued.
    """
    waiting = [
        (device, copies[::-1])
        for device in range(len(group.clocks))
        for copies in issue_order(stays, issued, device, group.queues)
    ]
    now, left = 0.0, [0.0] * len(waiting)
    running: list[_Issued | None] = [None] * len(waiting)
    out_ends: dict[int, float] = {}
    while True:
        later = INFINITY
        for at, (device, copies) in enumerate(waiting):
            if running[at] is None and copies:
                head = copies[-1]
                start = group.clocks[device].ends[head.position] if head.position >= 0 else 0.0
                start = max(start, 0.0 if head.out else out_ends.get(head.number, INFINITY))
                if start <= now:
                    running[at] = copies.pop()
                    left[at] = stays[head.number].out_s if head.out else stays[head.number].back_s
                else:
                    later = min(later, start)
        active = [at for at, copy in enumerate(running) if copy is not None]
        if not active and later == INFINITY:
            return out_ends
        speed = {at: _speed(group, running, at) for at in active}
        end, first = min(((now + left[at] / speed[at], at) for at in active), default=(INFINITY, -1))
        step = min(end, later)
        for at in active:
            left[at] -= (step - now) * speed[at]
        now = step
        if end <= later:
            copy = running[first]
            assert copy is not None
            running[first] = None
            if copy.out:
                out_ends[copy.number] = now


def _speed(group: CopyGroup, running: Sequence[_Issued | None], at: int) -> float:
    """The rate of a running copy, as a share of its rate alone."""
    if group.share == INFINITY:
        return 1.0
    copy = running[at]
    same = sum(other is not None and copy is not None and other.out == copy.out for other in running)
    return min(1.0, group.share / same)


def waits_s(clock: Clock, copies: Sequence[TimedCopy], queues: int = 1) -> float:
    """How much later a device's compute order ends because it waits for copies, if all inputs arrive as before.

    Args:
        clock: the order's times without copies.
        copies: of the device.
        queues: its host-copy queues.
    """
    host, now = HostQueue(copies, queues), 0.0
    for position, (start, end) in enumerate(zip(clock.starts, clock.ends, strict=True)):
        now = max(start, now, host.ready_s(position)) + end - start
        host.issue(position, now)
    return now - clock.ends[-1] if clock.ends else 0.0
