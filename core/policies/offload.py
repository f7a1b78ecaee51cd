"""Copies of saved tensors to the host and back: OFFLOAD and RELOAD, on the host-copy queues.

::

    compute queue     ─ 0F3 ─┬─ 0F4 ─┬─ 0F5 ─ 1B0 ─┬─ 1B1 ─┬─ 0B3 ─
                             │ 1     │ 2           │ 3     │ 4
    host copies              └▶[ 0OFFLOAD3 ]       └▶[ 0RELOAD3 ]

1. OFFLOAD is issued when F has ended, after its sends. From then on its bytes are on the host, too.
2. ``freed_at`` of the memory policy waits for the copy. From its start on the bytes are not on the device.
3. RELOAD is issued when ``reload_after`` has ended. From then on the bytes are on the device again. The copy also waits
   for its own OFFLOAD.
4. B, or I, waits for the copy. From its start on the bytes are not on the host.

The copies of a device run one after another in the order issued. Of those issued at the same position, RELOADs are
first, in the order in which they are read. Both directions share one queue, or each has its own
(``MemoryPolicy.host_copy_queues``).

Where offloaded tensors are on the host: one arena per device, allocated once, with a slot for every copy.

A slot is occupied from the issue of OFFLOAD until the action that waits for RELOAD starts. These are positions in the
compute order, so the slots follow from the plan alone, and two slots whose times overlap are apart in memory::

    bytes ▲  │ 0F2 ▐███ 1F0 ██▌       │ 1F3 ▐██
          │  │ 0F1 ▐███████████████▌ 0F4 ▐█████████
          └──┴─────────────────────────────────────▶ position in the compute order

Several layouts are computed, and the smallest is used:

1. slots in the order of their start, each at the lowest offset where it fits;
2. a region for each stage, in which all slots have one size, so that no gaps remain;
3. if these waste more than ``WASTE``: the slots with the largest product of time and bytes first.

So the arena is at most the sum of the stages' peaks, and for one stage exactly the peak.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy
from attrs import frozen

from ..actions import BACKWARD_KINDS, Action, Kind
from ..cluster.cluster import Cluster
from ..cluster.collectives import Phase
from ..cluster.routing import path_latency_s, reverse
from ..costs.costs import Compute, StageCosts
from ..plan.items import Item, Task
from ..plan.kinds import Movement, TaskKind, declare
from ..plan.memory import CHANGES, Memory, Size, held_bytes
from ..plan.memory_policy import backward_of
from ..plan.plan import Plan
from ..trace.trace import FROM_HOST_QUEUE, HOST_COPY_QUEUE, TO_HOST_QUEUE

_KINDS = (Kind.OFFLOAD, Kind.RELOAD)
_REASONS = {Kind.OFFLOAD: "frees its memory", Kind.RELOAD: "brings back what it reads"}


class PlannedCopy(NamedTuple):
    """A copy that a plan's memory policy asks for.

    Args:
        after: the compute action whose end issues it.
        reader: the compute action that waits for it.
        issued, awaited: positions of these two in the compute order of the device.
    """

    action: Action
    after: Action
    reader: Action
    issued: int
    awaited: int


def planned_copies(plan: Plan, device: int) -> list[PlannedCopy]:
    """The copies of a device, in the order in which they are issued."""
    own = [each for each in plan.memory.offload if plan.placement[each.stage] == device]
    at = {action: position for position, action in enumerate(plan.device_actions[device] if own else ())}
    found = []
    for stage, copy in ((each.stage, copy) for each in own for copy in each.copies):
        forward, backward = Action(stage, Kind.F, copy.microbatch), backward_of(stage, copy.microbatch, at)
        for kind, after, reader in (
            (Kind.OFFLOAD, forward, copy.freed_at),
            (Kind.RELOAD, copy.reload_after, backward),
        ):
            found.append(PlannedCopy(Action(stage, kind, copy.microbatch), after, reader, at[after], at[reader]))
    found.sort(key=lambda copy: (copy.issued, copy.action.kind is Kind.OFFLOAD, copy.awaited))
    return found


def copied_sizes(plan: Plan) -> Mapping[Size, Mapping[int, int]]:
    """The sizes in the memory table that a plan's memory policy sets, and not its costs: bytes by stage."""
    return {Size.OFFLOADED: plan.offloaded_bytes}


def _insert(plan: Plan, device: int) -> Iterator[tuple[int, Action]]:
    for copy in planned_copies(plan, device):
        yield copy.issued, copy.action


def _tasks(plan: Plan, compute: Compute, items: Sequence[Item], known: Sequence[Task]) -> Iterator[Task]:
    """One task per copy."""
    readers = {copy.action: copy.reader for device in range(plan.devices) for copy in planned_copies(plan, device)}
    places = [_places(actions) for actions in compute] if readers else []
    out: dict[tuple[int | None, int | None], int] = {}  # stage and microbatch → number of the task of its OFFLOAD
    for number, item in enumerate(items, len(known)):
        device, action = item.device, item.action
        waits: tuple[int, ...] = ()
        if action.kind is Kind.OFFLOAD:
            out[action.stage, action.microbatch] = number
        else:
            waits = (out[action.stage, action.microbatch],)
        queue = _queue(plan, action.kind)
        moved = item._replace(queue=queue, waits=waits)
        reader = (device, places[device][readers[action]])
        yield Task(action.kind, _REASONS[action.kind], (moved,), (reader,), (queue, device))


def _places(actions: Sequence[Action]) -> dict[Action, int]:
    """The position of each action of a compute order in the compute queue: a backward begins with its RECOMPUTE."""
    found: dict[Action, int] = {}
    for position, action in enumerate(actions):
        again = position and actions[position - 1].kind is Kind.RECOMPUTE and action.kind in BACKWARD_KINDS
        found[action] = position - 1 if again else position
    return found


def _queue(plan: Plan, kind: Kind) -> str:
    if plan.memory.host_copy_queues == 1:
        return HOST_COPY_QUEUE
    return TO_HOST_QUEUE if kind is Kind.OFFLOAD else FROM_HOST_QUEUE


def _moves(task: Task, plan: Plan, _: Sequence[StageCosts], cluster: Cluster) -> Movement:
    """A copy moves over the links between its device and the nearest host.

    Raises:
        RequestError: the device reaches no host.
    """
    item = task.items[0]
    path = cluster.host_path(item.device)
    if item.action.kind is Kind.RELOAD:
        path = reverse(path)
    size = plan.offloaded_bytes[item.action.stage]
    return Movement([[Phase(size, path_latency_s(path), path)]], size)


declare(
    TaskKind(
        _KINDS,
        HOST_COPY_QUEUE,
        _insert,
        _tasks,
        moves=_moves,
        changes={kind: CHANGES[kind] for kind in _KINDS},
    )
)


WASTE = 0.01
"""Share of the peak that the quick layouts may waste before others are tried, which take longer."""
ALIGNMENT_BYTES = 64
"""Every storage starts at a multiple of this: a cache line, and what torch's CPU allocator guarantees."""


@frozen
class HostSlots:
    """The host arena of a device.

    Args:
        peak_bytes: the most that is occupied at once: a lower bound of the arena's size.
        offsets: (stage, microbatch) → the offset in bytes of each of the stage's storages, in the order of the plan.
    """

    bytes: int
    peak_bytes: int
    offsets: dict[tuple[int, int], tuple[int, ...]]


class _Slot(NamedTuple):
    """A slot: positions in the compute order between which it is occupied, and its bytes."""

    stage: int
    microbatch: int
    start: int
    end: int
    bytes: int


def host_slots(plan: Plan, device: int) -> HostSlots:
    """The host arena of a device."""
    parts = {each.stage: _parts([storage.bytes for storage in each.storages]) for each in plan.memory.offload}
    sizes = {stage: ends[-1] for stage, ends in parts.items()}
    slots = _slots(plan, device, sizes)
    moved = [(c.action.kind, c.issued + 1, c.awaited, sizes[c.action.stage]) for c in planned_copies(plan, device)]
    peak = int(max(held_bytes([0.0] * (2 * len(plan.device_actions[device]) + 1), moved, Memory.HOST)))
    placed = min(_in_order(slots), _by_stage(slots), key=itemgetter(0))
    if placed[0] > (1 + WASTE) * peak:
        placed = min(placed, _largest_first(slots), key=itemgetter(0))
    offsets = {
        (slot.stage, slot.microbatch): tuple(offset + start for start in parts[slot.stage][:-1])
        for slot, offset in zip(slots, placed[1], strict=True)
    }
    return HostSlots(placed[0], peak, offsets)


def _parts(sizes: Sequence[int]) -> list[int]:
    """Where each storage of a slot starts, and the slot's size."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return ends


def _slots(plan: Plan, device: int, sizes: dict[int, int]) -> list[_Slot]:
    """The slots of a device in the order in which they are occupied."""
    started: dict[tuple[int, int | None], int] = {}
    found = []
    for copy in planned_copies(plan, device):
        stage, microbatch = copy.action.stage, copy.action.microbatch
        if copy.action.kind is Kind.OFFLOAD:
            started[stage, microbatch] = copy.issued
        elif microbatch is not None:
            found.append(_Slot(stage, microbatch, started[stage, microbatch], copy.awaited, sizes[stage]))
    return sorted(found, key=lambda slot: slot.start)


Placed = tuple[int, list[int]]
"""Size of the arena, and the offset of every slot."""


def _in_order(slots: Sequence[_Slot]) -> Placed:
    """Place slots in the order of their start, each in the lowest gap between those that are occupied then."""
    offsets: list[int] = []
    size = 0
    occupied: list[tuple[int, int, int]] = []  # offset, its end, the position at which it is free again; by offset
    for slot in slots:
        occupied = [each for each in occupied if each[2] > slot.start]
        starts = [0, *(end for _, end, _ in occupied)]
        ends = [*(offset for offset, _, _ in occupied), float("inf")]
        offset = next(a for a, b in zip(starts, ends, strict=True) if b - a >= slot.bytes)
        offsets.append(offset)
        occupied.append((offset, offset + slot.bytes, slot.end))
        occupied.sort()
        size = max(size, offset + slot.bytes)
    return size, offsets


def _by_stage(slots: Sequence[_Slot]) -> Placed:
    """Each stage has a region of its own."""
    offsets: dict[_Slot, int] = {}
    base = 0
    for stage in sorted({slot.stage for slot in slots}):
        own = [slot for slot in slots if slot.stage == stage]
        size, inside = _in_order(own)
        offsets.update(zip(own, (base + offset for offset in inside), strict=True))
        base += size
    return base, [offsets[slot] for slot in slots]


def _largest_first(slots: Sequence[_Slot]) -> Placed:
    """Place slots from the largest product of time and bytes down, each at the lowest offset that is free over all of
    its time."""
    starts, ends, sizes = (numpy.array(column) for column in list(zip(*slots, strict=True))[2:])
    offsets = numpy.zeros(len(slots), dtype=numpy.int64)
    placed = numpy.zeros(len(slots), dtype=bool)
    for number in numpy.argsort(-(ends - starts) * sizes, kind="stable").tolist():
        other = numpy.flatnonzero(placed & (starts < ends[number]) & (ends > starts[number]))
        other = other[numpy.argsort(offsets[other], kind="stable")]
        free = numpy.maximum.accumulate(numpy.append(0, offsets[other] + sizes[other]))  # from here up to the next one
        fits = numpy.append(offsets[other] - free[:-1] >= sizes[number], True)
        offsets[number] = free[fits.argmax()]
        placed[number] = True
    return int((offsets + sizes).max()), offsets.tolist()
