"""The causes of the idle time of each device, with the seconds of each cause.

Between two of its operations it waits for the message that arrives last. Until that message was sent, another device's
compute is what it waits for; from then on, communication (a rendezvous and the queue included)::

    device 0   ──── 0F3 ────┐ sent            arrived
    device 1   1F2 ─┤ dependency │ communication ├─ 1F3 ──

If it then still waits for a copy to or from the host, the rest is the copy's; and then that of the sum of an earlier
microbatch's gradients over replicas::

    host copies      [     0OFFLOAD1     ]
    device 0   0F1 ──┤ host copy         ├─ 0F2 ──

What comes later because links are shared is part of the same causes. What sharing costs the step is in the idle time.

These are the seconds that each device waited in this run, by cause. They are not what the step would gain without a
cause: removing a wait may only make the next one longer. ``core/timing/idle.py`` computes the gains, by further runs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..core.actions import Action, Kind
from ..core.lowering.queues import Queues
from ..core.lowering.residency import OperationTimes
from .channels import QueueTimes
from .tasks import TaskTimes

WARM_UP = "warm-up"
DEPENDENCY = "dependency"
COMMUNICATION = "communication"
HOST_COPY = "host copy"
REDUCTION = "reduction"
OPTIMIZER = "optimizer"
COOL_DOWN = "cool-down"
CAUSES = {
    WARM_UP: "before its first action",
    DEPENDENCY: "another device still computes what it reads",
    COMMUNICATION: "what it reads is sent, and not yet there",
    HOST_COPY: "saved tensors have yet to reach the host, or to return",
    REDUCTION: "gradients are summed, over replicas or of a tied weight, or parameters gathered",
    OPTIMIZER: "its optimizer step waits for other stages",
    COOL_DOWN: "after its last action, others still work",
}

_SUMS = (Kind.REDUCE_GRAD, Kind.REDUCE_TIED)
_OVER_REPLICAS = (Kind.SCATTER_GRAD, Kind.UNSHARD)
"""Those of them that compute within a step waits for."""

TransferTimes = Mapping[tuple[int, int], QueueTimes]


def device_bubbles(
    queues: Queues,
    operation_times: OperationTimes,
    transfer_times: TransferTimes,
    tasks: Sequence[TaskTimes],
    step_s: float,
) -> tuple[dict[str, float], ...]:
    """Per device its idle seconds by cause, all of ``CAUSES``; with its operations they add up to the step.

    Args:
        queues: of the lowered plan with all its replicas.
    """
    sent = _last_sent(queues, operation_times, transfer_times)
    reduced: dict[tuple[int, int], _Awaited] = {}
    for reduction in (each for each in tasks if each.action.kind in _SUMS):  # SYNC is not: the optimizer waits
        _keep_latest(reduced, (reduction.device, reduction.action.stage), reduction)
    summed = _last_ended(queues, [task for task in tasks if task.action.kind in _OVER_REPLICAS])
    copied = _last_ended(queues, [task for task in tasks if task.action.kind not in _OVER_REPLICAS])
    gathered: dict[tuple[int, int], _Awaited] = {}
    for gather in (each for each in tasks if each.action == Action(each.action.stage, Kind.UNSHARD)):
        _keep_latest(gathered, (gather.device, 0), gather)
    result = []
    for device, actions in enumerate(queues.compute):
        found = _Device()
        starts, ends = operation_times[device]
        last_end = 0.0
        for position, action in enumerate(actions):
            start = starts[position]
            if start > last_end:
                if position == 0:
                    found.causes[WARM_UP] += start - last_end
                elif action.kind is Kind.STEP:
                    found.before_step(last_end, start, reduced.get((device, action.stage)))
                else:
                    at = device, position
                    found.before_compute(last_end, start, sent.get(at), copied.get(at), summed.get(at))
            last_end = ends[position]
        after = gathered.get((device, 0))
        if after is not None:
            found.moved_after(last_end, after)
        found.causes[COOL_DOWN] = step_s - max(last_end, after.until_s if after is not None else last_end)
        result.append(found.causes)
    return tuple(result)


class _Awaited(NamedTuple):
    """What an operation waits for: when it was sent, and when it was there."""

    sent_s: float
    until_s: float


class _Device:
    """Adds up why one device idles."""

    def __init__(self) -> None:
        self.causes = dict.fromkeys(CAUSES, 0.0)

    def before_step(self, last_end: float, start: float, awaited: _Awaited | None) -> None:
        """It idles until an optimizer step."""
        waited_s = min(max(awaited.until_s - last_end, 0.0), start - last_end) if awaited else 0.0
        self.causes[REDUCTION] += waited_s
        self.causes[OPTIMIZER] += start - last_end - waited_s

    def moved_after(self, last_end: float, awaited: _Awaited) -> None:
        """After its last operation, its parameters are gathered."""
        self.causes[REDUCTION] += max(awaited.until_s - last_end, 0.0)

    def before_compute(
        self, last_end: float, start: float, message: _Awaited | None, copy: _Awaited | None, summed: _Awaited | None
    ) -> None:
        """It idles until F, I, W or B."""
        arrived_s = max(message.until_s if message else last_end, last_end)
        copied_s = max(copy.until_s if copy else last_end, arrived_s)
        there_s = start
        if summed is not None:
            there_s = min(copied_s, start)
            self.causes[REDUCTION] += start - there_s
        if copy is not None:
            until_s, there_s = there_s, min(arrived_s, there_s)
            self.causes[HOST_COPY] += until_s - there_s
        sent_s = min(max(message.sent_s if message else last_end, last_end), there_s)
        self.causes[DEPENDENCY] += sent_s - last_end
        self.causes[COMMUNICATION] += there_s - sent_s


def _keep_latest(found: dict[tuple[int, int], _Awaited], key: tuple[int, int], task: TaskTimes) -> None:
    if key not in found or task.end_s > found[key].until_s:
        found[key] = _Awaited(task.end_s, task.end_s)


def _last_ended(queues: Queues, tasks: Sequence[TaskTimes]) -> dict[tuple[int, int], _Awaited]:
    """For (device, operation) the task of another queue, such as a host copy, that ended last for it."""
    readers = {
        (device, item.action): position
        for task in queues.tasks
        for item in task.items
        for device, position in task.readers
        if device == item.device and queues.compute[device][position].kind is not Kind.STEP
    }
    latest: dict[tuple[int, int], _Awaited] = {}
    for task in tasks:
        if (task.device, task.action) in readers:
            _keep_latest(latest, (task.device, readers[task.device, task.action]), task)
    return latest


def _last_sent(
    queues: Queues, operation_times: OperationTimes, transfer_times: TransferTimes
) -> dict[tuple[int, int], _Awaited]:
    """For (device, operation) the message that arrived last for it."""
    latest: dict[tuple[int, int], _Awaited] = {}
    for (src, dst), messages in queues.messages.items():
        ends = operation_times[src][1]
        for message, arrived_s in zip(messages, transfer_times[src, dst].arrivals, strict=True):
            key = dst, message.reader
            known = latest.get(key)
            if known is None or arrived_s > known.until_s:
                latest[key] = _Awaited(ends[message.issued], arrived_s)
    return latest
