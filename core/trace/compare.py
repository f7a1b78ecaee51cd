"""Comparison of a predicted step with a measured one, action by action.

Errors are predicted − measured, relative ones divided by the measured value: above 0 the prediction was too high.

Most transports do not report when a transfer ran. A measured message then ends when its reader has waited for it, and
its duration includes that wait, so it is not compared with the time on the link. Start and end are always compared.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from attrs import frozen

from ..actions import COMM_KINDS, WORK_KINDS, Action, Kind, known_kinds
from ..ratios import bubble_ratio
from .trace import HOST_MEMORY, MEMORY_KINDS, Trace, TraceEvent


@frozen
class Pair:
    """A predicted and a measured value.

    Args:
        predicted, measured: in one unit.
        error: predicted ÷ measured − 1; None where the measured value is 0 and the predicted one is not.
    """

    predicted: float
    measured: float
    error: float | None


def pair(predicted: float, measured: float) -> Pair:
    """Two values with their relative error."""
    if measured == 0:
        return Pair(predicted, measured, 0.0 if predicted == 0 else None)
    return Pair(predicted, measured, predicted / measured - 1)


@frozen
class ActionError:
    """One action that both traces have. Times in seconds from the start of each step.

    Args:
        device, action: the action and its device.
        queue: name of its queue in the measured trace.
        start, end, duration: predicted and measured, in seconds.
        reported: whether the measured duration is one that the transport reported (``TraceEvent.reported``).
    """

    device: int
    action: Action
    queue: str
    start: Pair
    end: Pair
    duration: Pair
    reported: bool = False


@frozen
class ActionOnDevice:
    """An action and the device that ran it."""

    device: int
    action: Action


@frozen
class KindSummary:
    """Durations of all actions of one kind.

    Args:
        predicted_s, measured_s: sums, in seconds.
        bias: relative error of the sum; None if the measured sum is 0 and the predicted one is not.
        median_error, mean_error: of the actions' absolute relative errors; None if no action has one.
        worst_error: the relative error with the largest absolute value.
        worst: the action with that error.
        worst_off_s: predicted − measured of that action, in seconds.
    """

    kind: Kind
    count: int
    predicted_s: float
    measured_s: float
    bias: float | None
    median_error: float | None
    mean_error: float | None
    worst_error: float | None
    worst: ActionOnDevice | None
    worst_off_s: float | None = None


def _by_kind(actions: Iterable[ActionError]) -> list[tuple[Kind, list[ActionError]]]:
    """The actions of each kind, in the order of ``Kind``."""
    groups: dict[Kind, list[ActionError]] = defaultdict(list)
    for item in actions:
        groups[item.action.kind].append(item)
    return [(kind, groups[kind]) for kind in known_kinds() if kind in groups]


def _kind_summary(kind: Kind, actions: Sequence[ActionError]) -> KindSummary:
    """The durations of these actions, which are all of one kind."""
    total = pair(sum(a.duration.predicted for a in actions), sum(a.duration.measured for a in actions))
    errors = [(a.duration.error, a) for a in actions if a.duration.error is not None]
    sizes = [abs(error) for error, _ in errors]
    worst = max(errors, key=lambda item: abs(item[0]), default=None)
    return KindSummary(
        kind,
        len(actions),
        total.predicted,
        total.measured,
        total.error,
        statistics.median(sizes) if sizes else None,
        statistics.fmean(sizes) if sizes else None,
        worst[0] if worst else None,
        ActionOnDevice(worst[1].device, worst[1].action) if worst else None,
        worst[1].duration.predicted - worst[1].duration.measured if worst else None,
    )


@frozen
class PeakMemory:
    """Peak memory of one device, in bytes: of one kind, or ``total`` over the kinds that both traces have."""

    device: int
    kind: str
    peak: Pair


@frozen
class DeviceTime:
    """Compute time of one device (``WORK_KINDS``), in seconds, over the actions that both traces have."""

    device: int
    compute: Pair


@frozen
class DeviceBubble:
    """Share of the step in which a device computes nothing."""

    device: int
    predicted: float
    measured: float


@frozen
class OrderDifference:
    """A queue whose actions ran in another order than predicted, over the actions that both traces have.

    Args:
        position: of the first difference, from 0.
        predicted, measured: the actions at that position.
        differing: number of positions at which the two orders differ.
    """

    device: int
    queue: str
    position: int
    predicted: Action
    measured: Action
    differing: int


@frozen
class Offset:
    """How far predicted times are from the measured ones, in seconds.

    Args:
        median_s: median of the absolute differences.
        worst_s: predicted − measured, of the message where it is largest.
    """

    median_s: float
    worst_s: float
    worst: ActionOnDevice


@frozen
class TransferSummary:
    """All messages of one kind.

    Args:
        start, end: how far predicted starts and ends are from measured ones.
        moved: durations of the transfers that the transport reported; None if it reported none.
    """

    kind: Kind
    count: int
    start: Offset
    end: Offset
    moved: KindSummary | None


@frozen
class Comparison:
    """The result of a comparison, which ``panpipe compare`` prints.

    Args:
        step: time of the step, in seconds.
        kinds: durations per kind, without messages, in the order of ``Kind``.
        memory: per device each kind that both traces have, then the total over these kinds, then the memory of its host
            that it uses.
        order: queues that ran in another order.
        only_predicted, only_measured: actions that only one trace has.
        actions: every action in both traces, in the prediction's order.
    """

    same_plan: bool
    step: Pair
    kinds: tuple[KindSummary, ...]
    bubbles: tuple[DeviceBubble, ...]
    memory: tuple[PeakMemory, ...]
    order: tuple[OrderDifference, ...]
    only_predicted: tuple[ActionOnDevice, ...]
    only_measured: tuple[ActionOnDevice, ...]
    actions: tuple[ActionError, ...]
    devices: tuple[DeviceTime, ...] = ()
    transfers: tuple[TransferSummary, ...] = ()


def compare(predicted: Trace, measured: Trace) -> Comparison:
    """Compare a prediction with a measurement. Actions match by device and action; repeated ones by their order."""
    ours, theirs = _keyed(predicted.events), _keyed(measured.events)
    actions = tuple(_action_error(event, theirs[key]) for key, event in ours.items() if key in theirs)
    by_kind = _by_kind(actions)
    return Comparison(
        same_plan=predicted.plan_hash == measured.plan_hash,
        step=pair(predicted.step_s, measured.step_s),
        kinds=tuple(_kind_summary(kind, own) for kind, own in by_kind if kind not in COMM_KINDS),
        bubbles=_bubbles(predicted, measured),
        memory=_memory(predicted, measured),
        order=_order(ours, theirs),
        only_predicted=tuple(ActionOnDevice(key[0], key[1]) for key in ours if key not in theirs),
        only_measured=tuple(ActionOnDevice(key[0], key[1]) for key in theirs if key not in ours),
        actions=actions,
        devices=_devices(actions, min(predicted.devices, measured.devices)),
        transfers=tuple(_summary(kind, own) for kind, own in by_kind if kind in COMM_KINDS),
    )


def worst_actions(comparison: Comparison, count: int) -> tuple[ActionError, ...]:
    """The compute actions with the largest errors of their durations in seconds, the worst first."""
    compute = [each for each in comparison.actions if each.action.kind not in COMM_KINDS]
    compute.sort(key=lambda each: -abs(each.duration.predicted - each.duration.measured))
    return tuple(compute[:count])


_Key = tuple[int, Action, int]


def _keyed(events: Iterable[TraceEvent]) -> dict[_Key, TraceEvent]:
    seen: dict[tuple[int, Action], int] = defaultdict(int)
    result = {}
    for event in events:
        result[event.device, event.action, seen[event.device, event.action]] = event
        seen[event.device, event.action] += 1
    return result


def _action_error(ours: TraceEvent, theirs: TraceEvent) -> ActionError:
    return ActionError(
        ours.device,
        ours.action,
        theirs.queue,
        pair(ours.start_s, theirs.start_s),
        pair(ours.end_s, theirs.end_s),
        pair(ours.end_s - ours.start_s, theirs.end_s - theirs.start_s),
        theirs.reported,
    )


def _devices(actions: Sequence[ActionError], count: int) -> tuple[DeviceTime, ...]:
    result = []
    for device in range(count):
        own = [a.duration for a in actions if a.device == device and a.action.kind in WORK_KINDS]
        result.append(DeviceTime(device, pair(sum(d.predicted for d in own), sum(d.measured for d in own))))
    return tuple(result)


def _bubbles(predicted: Trace, measured: Trace) -> tuple[DeviceBubble, ...]:
    both = zip(bubble_per_device(predicted), bubble_per_device(measured), strict=False)
    return tuple(DeviceBubble(device, ours, theirs) for device, (ours, theirs) in enumerate(both))


def _memory(predicted: Trace, measured: Trace) -> tuple[PeakMemory, ...]:
    kinds = [kind for kind in memory_kinds(predicted) if kind in memory_kinds(measured)]
    shown = [*kinds, TOTAL] if kinds else []
    if all(any(sample.kind == HOST_MEMORY for sample in trace.memory) for trace in (predicted, measured)):
        kinds, shown = [*kinds, HOST_MEMORY], [*shown, HOST_MEMORY]
    both = zip(peak_memory(predicted, kinds), peak_memory(measured, kinds), strict=False)
    return tuple(
        PeakMemory(device, kind, pair(ours[kind], theirs[kind]))
        for device, (ours, theirs) in enumerate(both)
        for kind in shown
    )


def _order(ours: Mapping[_Key, TraceEvent], theirs: Mapping[_Key, TraceEvent]) -> tuple[OrderDifference, ...]:
    queues = [_queues(one, other) for one, other in ((ours, theirs), (theirs, ours))]
    result = []
    for (device, queue), expected in queues[0].items():
        found = queues[1].get((device, queue), [])
        # Queues of one name can differ in length, because runners may name their queues differently.
        differing = [i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b]
        if differing:
            first = differing[0]
            result.append(OrderDifference(device, queue, first, expected[first], found[first], len(differing)))
    return tuple(result)


def _queues(one: Mapping[_Key, TraceEvent], other: Mapping[_Key, TraceEvent]) -> dict[tuple[int, str], list[Action]]:
    queues: dict[tuple[int, str], list[TraceEvent]] = defaultdict(list)
    for key, event in one.items():
        if key in other:
            queues[event.device, event.queue].append(event)
    # Sorting is stable: actions that start at the same time keep the order issued.
    return {key: [e.action for e in sorted(events, key=lambda e: e.start_s)] for key, events in queues.items()}


def _summary(kind: Kind, actions: Sequence[ActionError]) -> TransferSummary:
    reported = [each for each in actions if each.reported]
    return TransferSummary(
        kind,
        len(actions),
        _offset([(each, each.start) for each in actions]),
        _offset([(each, each.end) for each in actions]),
        _kind_summary(kind, reported) if reported else None,
    )


def _offset(times: Sequence[tuple[ActionError, Pair]]) -> Offset:
    differences = [time.predicted - time.measured for _, time in times]
    worst = max(range(len(times)), key=lambda i: abs(differences[i]))
    action = times[worst][0]
    median = statistics.median(map(abs, differences))
    return Offset(median, differences[worst], ActionOnDevice(action.device, action.action))


TOTAL = "total"
"""Name of the sum over all kinds of memory."""


def bubble_per_device(trace: Trace) -> tuple[float, ...]:
    """1 − time in F, B, I, W and RECOMPUTE ÷ step time, per device; 0 for a step that takes no time."""
    busy = [0.0] * trace.devices
    for event in trace.events:
        if event.action.kind in WORK_KINDS:
            busy[event.device] += event.end_s - event.start_s
    return tuple(bubble_ratio(time, trace.step_s) for time in busy)


def memory_kinds(trace: Trace) -> tuple[str, ...]:
    """The kinds of the devices' own memory that a trace has samples of, in their usual order."""
    found = {sample.kind for sample in trace.memory} - {HOST_MEMORY}
    return (*(kind for kind in MEMORY_KINDS if kind in found), *sorted(found - set(MEMORY_KINDS)))


def memory_rows(trace: Trace, kinds: Sequence[str]) -> list[list[tuple[float, tuple[float, ...]]]]:
    """Per device (time, bytes of each kind) for every time at which one of these kinds changes.

    Samples of one device at one time take effect together, so that bytes that only change their kind count once.
    """
    rows: list[list[tuple[float, tuple[float, ...]]]] = [[] for _ in range(trace.devices)]
    now = [[0.0] * len(kinds) for _ in range(trace.devices)]
    for sample in trace.memory:
        if sample.kind in kinds:
            held, own = now[sample.device], rows[sample.device]
            held[kinds.index(sample.kind)] = sample.bytes
            if own and own[-1][0] == sample.time_s:
                own.pop()
            own.append((sample.time_s, tuple(held)))
    return rows


def peak_memory(trace: Trace, kinds: Sequence[str]) -> tuple[dict[str, float], ...]:
    """Per device the peak of each kind, and of the sum (``total``) over the device's own memory, in bytes."""
    own = [kind != HOST_MEMORY for kind in kinds]
    peaks = []
    for rows in memory_rows(trace, kinds):
        held = [each for _, each in rows] or [(0.0,) * len(kinds)]
        by_kind = dict(zip(kinds, map(max, zip(*held, strict=True)), strict=True))
        peaks.append({**by_kind, TOTAL: max(sum(compress(each, own)) for each in held)})
    return tuple(peaks)
