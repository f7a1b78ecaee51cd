"""The memory of each device over a step, from the times of its operations and messages.

The rules, per kind of memory:

==================  ===========================================================================================
parameters,         from the start to the end; of what replicas share, one replica's part;
                    with the parameters, values computed from parameters alone, once a step. Where replicas share
                    parameters, both are whole from the issue of UNSHARD to that of RESHARD
gradients,
optimizer
saved               ``saved_bytes`` from the start of F to the end of B; I frees ``freed_by_input_bytes`` and creates
                    ``created_by_input_bytes`` at its end, W frees the rest at its end. A stage that recomputes holds
                    ``input_bytes`` from the start of F to the start of RECOMPUTE, and ``saved_bytes`` after that.
                    Offloaded tensors are not on the device from the start of the action that waits for OFFLOAD to the
                    issue of RELOAD; they are on the host from the issue of OFFLOAD to the start of the backward
communication       a received tensor from the posting of its receive to the start of F (then it is one of the saved
                    tensors; without a backward, to the end of F) or to the end of B or I; a sent tensor from its send
                    to its arrival; a tensor between two stages of this device from the end of the action that computes
                    it, as if it was received then
workspace           while an action runs
==================  ===========================================================================================

Of events at the same time, an arrival comes first: it frees. A tensor between two stages of one device that both save
counts twice.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy
from attrs import frozen
from numpy.typing import NDArray

from ..actions import Action, Kind
from ..costs.costs import StageCosts
from ..plan.kinds import task_kinds
from ..plan.memory import Memory, Moment, Size, Use, changes, compute_bytes, place_of
from ..plan.plan import Plan
from ..policies.offload import copied_sizes
from ..policies.sharding import replica_costs
from .queues import Queues

STATE_KINDS = ("parameters", "gradients", "optimizer")
MOVING_KINDS = ("saved", "communication", "workspace", "parameters")
_COMMUNICATION = MOVING_KINDS.index("communication")

_F, _B, _I = Kind.F, Kind.B, Kind.I

OperationTimes = Sequence[tuple[Sequence[float], Sequence[float]]]
"""Per device the starts and the ends of its operations, in seconds."""
Arrivals = Mapping[tuple[int, int], Sequence[float]]
"""Per ordered pair of devices when each of its messages has arrived, in seconds."""
Release = tuple[float, int, float]
"""Arrival time of a sent tensor, the index of the change that sent it, and its bytes."""


@frozen(eq=False)
class Timeline:
    """One device's memory.

    Args:
        state: bytes of each of ``STATE_KINDS``, held throughout.
        times: of each change, in seconds, ascending.
        moving: bytes of each of ``MOVING_KINDS`` from that time on, shape (4, changes); of parameters those that are
            gathered, in addition to the state.
        host: bytes of saved tensors on the device's host from that time on, shape (changes,).
        operations: the operation that made each change, as an index into ``actions``.
        actions: the device's operations, in order.
    """

    state: tuple[float, ...]
    times: NDArray[numpy.float64]
    moving: NDArray[numpy.float64]
    host: NDArray[numpy.float64]
    operations: NDArray[numpy.int64]
    actions: tuple[Action, ...]

    @property
    def peak_bytes(self) -> float:
        """Peak of all memory together."""
        return sum(self.state) + float(self.moving.sum(axis=0).max())

    @property
    def peak_action(self) -> Action | None:
        """The action that first reaches the peak; None for a device without operations."""
        if not self.actions:
            return None
        return self.actions[int(self.operations[int(self.moving.sum(axis=0).argmax())])]

    @property
    def at_peak(self) -> dict[str, float]:
        """Bytes of each kind when the peak is first reached; their sum is ``peak_bytes``."""
        return self.at(int(self.moving.sum(axis=0).argmax()))

    @property
    def peak_by_kind(self) -> dict[str, float]:
        """Peak of each kind, each at its own time."""
        return self._of_kinds(self.moving.max(axis=1))

    @property
    def working(self) -> NDArray[numpy.float64]:
        """Bytes of all kinds but communication from the time of each change on."""
        held: NDArray[numpy.float64] = sum(self.state) + self.moving.sum(axis=0) - self.moving[_COMMUNICATION]
        return held

    def at(self, change: int) -> dict[str, float]:
        """Bytes of each kind from the time of a change on."""
        return self._of_kinds(self.moving[:, change])

    def of_kind(self, kind: str) -> NDArray[numpy.float64]:
        """Bytes of a kind from the time of each change on."""
        held = numpy.zeros(len(self.times))
        if kind in STATE_KINDS:
            held += self.state[STATE_KINDS.index(kind)]
        if kind in MOVING_KINDS:
            held += self.moving[MOVING_KINDS.index(kind)]
        return held

    def _of_kinds(self, moving: NDArray[numpy.float64]) -> dict[str, float]:
        found = dict(zip(STATE_KINDS, self.state, strict=True))
        for kind, size in zip(MOVING_KINDS, moving.tolist(), strict=True):
            found[kind] = found.get(kind, 0.0) + size
        return found

    @property
    def peak_saved_bytes(self) -> float:
        """Peak of the saved tensors."""
        return float(self.moving[0].max())


def device_timelines(
    plan: Plan, costs: Sequence[StageCosts], queues: Queues, operation_times: OperationTimes, arrivals: Arrivals
) -> tuple[Timeline, ...]:
    """The memory of every device over one step.

    Args:
        costs: per stage, of the whole stage.
        queues: of the lowered plan.
    """
    costs = replica_costs(plan, costs)
    communication, releases = _communication(plan, queues, arrivals)
    _add_passed(plan, queues, communication)
    effects = [
        compute_bytes(cost, recomputes=stage in plan.memory.recompute, forward_only=plan.forward_only)
        for stage, cost in enumerate(costs)
    ]
    result = []
    for device, actions in enumerate(queues.compute):
        starts, ends = operation_times[device]
        held = [costs[stage.index] for stage in plan.stages_on(device % plan.devices)]
        state = (
            float(sum(cost.parameter_bytes + cost.shared_bytes for cost in held)),
            float(sum(cost.gradient_bytes for cost in held)),
            float(sum(cost.optimizer_bytes for cost in held)),
        )
        moved = numpy.zeros((len(MOVING_KINDS) + 1, 2 * len(actions) + 1))
        if actions:
            rows = numpy.array([effects[action.stage].get(action.kind, _NOTHING) for action in actions])
            moved[0, 1::2], moved[0, 2::2], moved[2, 1::2], moved[2, 2::2] = rows.T
        moved[1] = communication[device]
        times = numpy.zeros(2 * len(actions) + 1)
        times[1::2], times[2::2] = starts, ends
        result.append((state, times, moved, releases[device], actions))
    _add_tasks(plan, queues, costs, [moved for _, _, moved, _, _ in result])
    return tuple(_timeline(*each) for each in result)


_NOTHING = (0.0, 0.0, 0.0, 0.0)
_ROWS = {(Memory.DEVICE, use): row for row, use in enumerate(MOVING_KINDS)} | {
    (Memory.HOST, Use.SAVED): len(MOVING_KINDS)
}


def _add_tasks(plan: Plan, queues: Queues, costs: Sequence[StageCosts], rows: Sequence[NDArray[numpy.float64]]) -> None:
    """Add the memory changes of tasks on other queues, at fixed positions of the compute order."""
    kinds, copied = task_kinds(), copied_sizes(plan)

    def size_of(size: Size, stage: int) -> float:
        return copied[size][stage] if size in copied else float(getattr(costs[stage], size))

    for task in queues.tasks:
        for change, item in itertools.product(kinds[task.kind].changes.get(task.kind, ()), task.items):
            reader = next((at for device, at in task.readers if device == item.device), None)
            size = change.sign * size_of(change.size, item.action.stage)
            row, place = _ROWS[change.memory, change.use], place_of(change.moment, item.issued, reader)
            rows[item.device][row, place] += size


def _communication(plan: Plan, queues: Queues, arrivals: Arrivals) -> tuple[list[list[float]], list[list[Release]]]:
    """Per device the communication bytes at each change, and when sent tensors are freed.

    The changes of a device: the receives posted before its first operation, then the start and the end of every
    operation; what is issued after an operation is added to its end.
    """
    read = {kind: _read_offset(kind, plan) for kind in (_F, _B, _I)}
    rows = [[0.0] * (2 * len(actions) + 1) for actions in queues.compute]
    releases: list[list[Release]] = [[] for _ in queues.compute]
    for (src, dst), messages in queues.messages.items():
        sender, receiver, released, readers = rows[src], rows[dst], releases[src], queues.compute[dst]
        for (_, _, _, _, size, issued, posted, reader), arrived_s in zip(messages, arrivals[src, dst], strict=True):
            receiver[2 * posted] += size
            receiver[2 * reader + read[readers[reader].kind]] -= size
            sender[2 * issued + 2] += size
            released.append((arrived_s, 2 * issued + 2, size))
    return rows, releases


def _read_offset(kind: Kind, plan: Plan) -> int:
    """The change at which an action frees the messages that it reads, counted from 2 × its position."""
    found = changes(kind, forward_only=plan.forward_only)
    return next(1 if change.moment is Moment.START else 2 for change in found if change.size is Size.READ)


def _add_passed(plan: Plan, queues: Queues, rows: list[list[float]]) -> None:
    """Add tensors that pass between stages of one device to its communication bytes."""
    where = plan.placement
    passed = [edge for edge in plan.edges if where[edge.src] == where[edge.dst]]
    read = _read_offset(_F, plan)
    for row, actions in zip(rows if passed else (), queues.compute, strict=False):
        at = {(a.stage, a.kind is _F, a.microbatch): i for i, a in enumerate(actions) if a.kind in (_F, _B, _I)}
        for edge in passed:
            for microbatch in range(plan.microbatches) if (edge.src, True, 0) in at else ():
                row[2 * at[edge.src, True, microbatch] + 2] += edge.bytes
                row[2 * at[edge.dst, True, microbatch] + read] -= edge.bytes
                if plan.forward_only:
                    continue
                row[2 * at[edge.dst, False, microbatch] + 2] += edge.gradient_bytes
                row[2 * at[edge.src, False, microbatch] + 2] -= edge.gradient_bytes


def _timeline(
    state: tuple[float, ...],
    times: NDArray[numpy.float64],
    changes: NDArray[numpy.float64],
    releases: list[Release],
    actions: tuple[Action, ...],
) -> Timeline:
    """Insert the releases of sent tensors among the operations' changes, by time, and sum the changes."""
    operations = numpy.maximum(numpy.arange(len(times)) - 1, 0) // 2
    if releases:
        at, sent_by, sizes = (numpy.array(column) for column in zip(*sorted(releases), strict=True))
        # A message that takes no time still arrives after its send.
        where = numpy.maximum(numpy.searchsorted(times, at, side="left"), sent_by.astype(numpy.int64) + 1)
        order = numpy.argsort(numpy.concatenate((2 * numpy.arange(len(times)) + 1, 2 * where)), kind="stable")
        freed = numpy.zeros((len(changes), len(at)))
        freed[1] = -sizes
        times = numpy.concatenate((times, at))[order]
        changes = numpy.concatenate((changes, freed), axis=1)[:, order]
        operations = numpy.concatenate((operations, numpy.maximum(where - 2, 0) // 2))[order]
    held = changes.cumsum(axis=1)
    return Timeline(state, times, held[:-1], held[-1], operations, actions)


def most_on_host(timelines: Sequence[Timeline]) -> float:
    """The most bytes that several devices hold on one host. Changes within a nanosecond are simultaneous: what one
    device frees then is not held together with what another one adds."""
    times = numpy.concatenate([timeline.times for timeline in timelines]).round(9)
    changes = numpy.concatenate([numpy.diff(timeline.host, prepend=0.0) for timeline in timelines])
    order = numpy.argsort(times, kind="stable")
    last = numpy.append(numpy.diff(times[order]) != 0, True)
    return float(changes[order].cumsum()[last].max())
