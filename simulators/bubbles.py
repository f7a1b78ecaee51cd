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

from collections.abc import Iterable, Mapping, Sequence

from ..core.actions import Action, Kind
from ..core.lowering.queues import Queues
from ..core.lowering.residency import OperationTimes
from .network import FlowTimes
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

MessageTimes = Mapping[tuple[int, int], Sequence[FlowTimes]]


def device_bubbles(
    queues: Queues,
    operation_times: OperationTimes,
    message_times: MessageTimes,
    tasks: Sequence[TaskTimes],
    step_s: float,
) -> tuple[dict[str, float], ...]:
    """Per device its idle seconds by cause, all of ``CAUSES``; with its operations they add up to the step.

    Args:
        queues: of the lowered plan with all its replicas.
    """
    sent = _last_sent(queues, operation_times, message_times)
    # SYNC is no sum: the optimizer waits.
    reduced = _latest(((each.device, each.action.stage), each.end_s) for each in tasks if each.action.kind in _SUMS)
    summed = _last_ended(queues, [task for task in tasks if task.action.kind in _OVER_REPLICAS])
    copied = _last_ended(queues, [task for task in tasks if task.action.kind not in _OVER_REPLICAS])
    gathers = [each for each in tasks if each.action == Action(each.action.stage, Kind.UNSHARD)]
    gathered = _latest(((each.device, 0), each.end_s) for each in gathers)
    result = []
    for device, actions in enumerate(queues.compute):
        causes = dict.fromkeys(CAUSES, 0.0)
        starts, ends = operation_times[device]
        last_end = 0.0
        for position, action in enumerate(actions):
            start, at = starts[position], (device, position)
            if start > last_end:
                if position == 0:
                    causes[WARM_UP] += start - last_end
                elif action.kind is Kind.STEP:
                    until_s = reduced.get((device, action.stage), last_end)
                    waited_s = min(max(until_s - last_end, 0.0), start - last_end)
                    causes[REDUCTION] += waited_s
                    causes[OPTIMIZER] += start - last_end - waited_s
                else:
                    sent_s, arrived_s = sent.get(at, (last_end, last_end))
                    _add(causes, last_end, start, sent_s, arrived_s, copied.get(at), at in summed)
            last_end = ends[position]
        done_s = max(last_end, gathered.get((device, 0), last_end))  # after its last operation parameters are gathered
        causes[REDUCTION] += done_s - last_end
        causes[COOL_DOWN] = step_s - done_s
        result.append(causes)
    return tuple(result)


def _add(
    causes: dict[str, float],
    last_end: float,
    start: float,
    sent_s: float,
    arrived_s: float,
    copied_s: float | None,
    summed: bool,
) -> None:
    """Add the idle time before F, I, W or B to its causes.

    Args:
        last_end, start: its begin and end.
        sent_s, arrived_s: of the message that arrived last.
        copied_s: when the last host copy had ended; None if it waits for none.
        summed: whether it waits for a sum over replicas.
    """
    arrived_s, there_s = max(arrived_s, last_end), start
    if summed:
        there_s = min(arrived_s if copied_s is None else max(copied_s, arrived_s), start)
        causes[REDUCTION] += start - there_s
    if copied_s is not None:
        until_s, there_s = there_s, min(arrived_s, there_s)
        causes[HOST_COPY] += until_s - there_s
    sent_s = min(max(sent_s, last_end), there_s)
    causes[DEPENDENCY] += sent_s - last_end
    causes[COMMUNICATION] += there_s - sent_s


def _latest(ends: Iterable[tuple[tuple[int, int], float]]) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for key, end_s in ends:
        found[key] = max(end_s, found.get(key, end_s))
    return found


def _last_ended(queues: Queues, tasks: Sequence[TaskTimes]) -> dict[tuple[int, int], float]:
    """For (device, operation) the end of the last task of another queue, such as a host copy, that it waits for."""
    readers = {
        (device, item.action): position
        for task in queues.tasks
        for item in task.items
        for device, position in task.readers
        if device == item.device and queues.compute[device][position].kind is not Kind.STEP
    }
    awaited = [task for task in tasks if (task.device, task.action) in readers]
    return _latest(((task.device, readers[task.device, task.action]), task.end_s) for task in awaited)


def _last_sent(
    queues: Queues, operation_times: OperationTimes, message_times: MessageTimes
) -> dict[tuple[int, int], tuple[float, float]]:
    """For (device, operation) when the message was sent that arrived last for it, and when it arrived."""
    latest: dict[tuple[int, int], tuple[float, float]] = {}
    for (src, dst), messages in queues.messages.items():
        ends = operation_times[src][1]
        for message, flow in zip(messages, message_times[src, dst], strict=True):
            known = latest.get((dst, message.reader))
            if known is None or flow.arrived_s > known[1]:
                latest[dst, message.reader] = ends[message.issued], flow.arrived_s
    return latest
