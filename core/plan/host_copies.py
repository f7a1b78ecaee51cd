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
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..actions import BACKWARD_KINDS, Action, Kind
from ..cluster.cluster import Cluster
from ..cluster.collectives import Phase
from ..cluster.routing import path_latency_s, reverse
from ..errors import RequestError
from ..trace.trace import FROM_HOST_QUEUE, HOST_COPY_QUEUE, TO_HOST_QUEUE
from .items import Item, Task
from .kinds import Compute, TaskKind, declare
from .memory import CHANGES
from .offload import backward_of
from .plan import Plan

_KINDS = (Kind.OFFLOAD, Kind.RELOAD)
_REASONS = {Kind.OFFLOAD: "frees its memory", Kind.RELOAD: "brings back what it reads"}


class PlannedCopy(NamedTuple):
    """A copy that a plan's memory policy asks for.

    Args:
        action: OFFLOAD or RELOAD.
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
    """The copies of a device, in the order in which they are issued.

    Args:
        plan: a plan with a sound memory policy.
        device: its number along the pipeline.
    """
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


def _insert(plan: Plan, device: int) -> Iterator[tuple[int, Action]]:
    for copy in planned_copies(plan, device):
        yield copy.issued, copy.action


def _tasks(plan: Plan, compute: Compute, items: Sequence[Item], known: Sequence[Task]) -> Iterator[Task]:
    """One task per copy, which must be issued where the plan has it."""
    wanted = {(d, copy.action): copy for d in range(plan.devices) for copy in planned_copies(plan, d)}
    missing = wanted.keys() - {(item.device, item.action) for item in items}
    if missing:
        device, action = min(missing, key=lambda each: (each[0], str(each[1])))
        raise RequestError(f"device {device} issues no {action}, and the plan's memory.offload has it: add it")
    places = [_places(actions) for actions in compute] if wanted else []
    out: dict[tuple[int | None, int | None], int] = {}  # stage and microbatch → number of the task of its OFFLOAD
    for number, item in enumerate(items, len(known)):
        device, action = item.device, item.action
        copy = wanted.pop((device, action), None)
        if copy is None:
            raise RequestError(
                f"device {device} issues {action}, which the plan's memory.offload does not have, or twice: remove it"
            )
        if item.issued != places[device].get(copy.after, (0, -1))[1] + 1:
            before = compute[device][item.issued - 1] if item.issued else "nothing"
            raise RequestError(
                f"device {device} issues {action} after {before}, and the plan after {copy.after}: move it there"
            )
        waits: tuple[int, ...] = ()
        if action.kind is Kind.OFFLOAD:
            out[action.stage, action.microbatch] = number
        else:
            waits = (out[action.stage, action.microbatch],)
        queue = _queue(plan, action.kind)
        reader = (device, places[device][copy.reader][0])
        moved = item._replace(queue=queue, waits=waits)
        yield Task(action.kind, str(action), _REASONS[action.kind], (moved,), (reader,), (queue, device))


def _places(actions: Sequence[Action]) -> dict[Action, tuple[int, int]]:
    """Per action of a compute order the positions of its first and last item: a backward begins with its RECOMPUTE."""
    recomputed: dict[tuple[int, int | None], int] = {}
    found = {}
    for position, action in enumerate(actions):
        if action.kind is Kind.RECOMPUTE:
            recomputed[action.stage, action.microbatch] = position
        elif action.kind in BACKWARD_KINDS:
            found[action] = recomputed.get((action.stage, action.microbatch), position), position
        else:
            found[action] = position, position
    return found


def _queue(plan: Plan, kind: Kind) -> str:
    if plan.memory.host_copy_queues == 1:
        return HOST_COPY_QUEUE
    return TO_HOST_QUEUE if kind is Kind.OFFLOAD else FROM_HOST_QUEUE


def copy_phase(plan: Plan, task: Task, cluster: Cluster) -> Phase:
    """What an OFFLOAD or RELOAD moves over the links between its device and the nearest host.

    Args:
        plan: gives the bytes.
        task: the copy.
        cluster: its devices in the order of ranks.

    Raises:
        RequestError: the device reaches no host.
    """
    item = task.items[0]
    path = cluster.host_path(item.device)
    if item.action.kind is Kind.RELOAD:
        path = reverse(path)
    return Phase(plan.offloaded_bytes[item.action.stage], path_latency_s(path), path)


def _seconds_alone(plan: Plan, task: Task, cluster: Cluster) -> float:
    return copy_phase(plan, task, cluster).seconds


declare(
    TaskKind(
        _KINDS,
        HOST_COPY_QUEUE,
        _insert,
        _tasks,
        seconds_alone=_seconds_alone,
        changes={kind: CHANGES[kind] for kind in _KINDS},
    )
)
