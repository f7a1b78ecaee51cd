"""A predicted step laid over a measured one, action by action.

Errors are predicted − measured, relative ones divided by the measured value: above 0 the prediction was too high.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from ..actions import COMM_KINDS, WORK_KINDS, Action, Kind, known_kinds
from .trace import MEMORY_KINDS, Trace, TraceEvent

TOTAL = "total"
"""Name of the sum over all kinds of memory."""


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
        device, action: which.
        queue: where it was measured.
        start, end, duration: both values of each.
    """

    device: int
    action: Action
    queue: str
    start: Pair
    end: Pair
    duration: Pair


@frozen
class ActionOnDevice:
    """An action and the device that did it."""

    device: int
    action: Action


@frozen
class KindSummary:
    """Durations of all actions of one kind.

    Args:
        kind: which.
        count: how many both traces have.
        predicted_s, measured_s: sums, in seconds.
        bias: relative error of the sum; None where nothing was measured and something predicted.
        median_error, mean_error: of the sizes of the actions' relative errors; None where no action has one.
        worst_error: the relative error of largest size, with its sign.
        worst: the action that has it.
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


@frozen
class PeakMemory:
    """Peak memory of one device, in bytes: of one kind, or ``total`` over the kinds that both traces know."""

    device: int
    kind: str
    peak: Pair


@frozen
class DeviceTime:
    """Time in F, B, I and W of one device, in seconds, over the actions that both traces have."""

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
        device, queue: which.
        position: of the first difference, from 0.
        predicted, measured: the actions that stand there.
        differing: at how many positions the two orders differ.
    """

    device: int
    queue: str
    position: int
    predicted: Action
    measured: Action
    differing: int


@frozen
class Comparison:
    """Everything that ``panpipe compare`` says.

    Args:
        same_plan: whether both traces ran one plan.
        step: time of the step, in seconds.
        kinds: per kind, in the order of ``Kind``.
        bubbles: per device.
        memory: per device and kind that both traces know, then the device's total over them.
        order: queues that ran in another order.
        only_predicted, only_measured: actions that the other trace lacks.
        actions: every action in both, in the prediction's order.
        devices: time of each device's computing.
        drift: how much slower the machine was while the step was measured than while the prediction's costs were, as a
            share, by the reference workload; None where either trace does not know.
        corrected: the step with the prediction corrected for that drift.
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
    drift: float | None = None
    corrected: Pair | None = None


def compare(predicted: Trace, measured: Trace) -> Comparison:
    """Lay a prediction over a measurement. Actions match by device and action; repeats by their order."""
    ours, theirs = _keyed(predicted.events), _keyed(measured.events)
    actions = tuple(_action_error(event, theirs[key]) for key, event in ours.items() if key in theirs)
    drift = drift_of(predicted.reference_s, measured.reference_s)
    return Comparison(
        same_plan=predicted.plan_hash == measured.plan_hash,
        step=pair(predicted.step_s, measured.step_s),
        kinds=_summaries(actions),
        bubbles=_bubbles(predicted, measured),
        memory=_memory(predicted, measured),
        order=_order(ours, theirs),
        only_predicted=tuple(ActionOnDevice(key[0], key[1]) for key in ours if key not in theirs),
        only_measured=tuple(ActionOnDevice(key[0], key[1]) for key in theirs if key not in ours),
        actions=actions,
        devices=_devices(actions, min(predicted.devices, measured.devices)),
        drift=drift,
        corrected=None if drift is None else pair(predicted.step_s * (1 + drift), measured.step_s),
    )


def drift_of(then_s: float | None, now_s: float | None) -> float | None:
    """How much slower a machine has become, as a share: from what its reference workload took then and takes now."""
    return None if then_s is None or now_s is None else now_s / then_s - 1


def worst_actions(comparison: Comparison, count: int) -> tuple[ActionError, ...]:
    """The actions of computing whose durations were wrong by the most seconds, the worst first."""
    compute = [each for each in comparison.actions if each.action.kind not in COMM_KINDS]
    compute.sort(key=lambda each: -abs(each.duration.predicted - each.duration.measured))
    return tuple(compute[:count])


def bubble_per_device(trace: Trace) -> tuple[float, ...]:
    """1 − time in F, B, I, W and RECOMPUTE ÷ step time, per device; 0 for a step that takes no time."""
    busy = [0.0] * trace.devices
    for event in trace.events:
        if event.action.kind in WORK_KINDS:
            busy[event.device] += event.end_s - event.start_s
    return tuple(1 - time / trace.step_s if trace.step_s > 0 else 0.0 for time in busy)


def memory_kinds(trace: Trace) -> tuple[str, ...]:
    """The kinds of memory that a trace has samples of, in their usual order."""
    found = {sample.kind for sample in trace.memory}
    return (*(kind for kind in MEMORY_KINDS if kind in found), *sorted(found - set(MEMORY_KINDS)))


def peak_memory(trace: Trace, kinds: Iterable[str]) -> tuple[dict[str, float], ...]:
    """Per device the peak of each kind and of their sum (``total``), in bytes.

    Samples of one device at one time take effect together, so that bytes that only change their kind count once.
    """
    kinds = tuple(kinds)
    held: list[dict[str, float]] = [dict.fromkeys(kinds, 0.0) for _ in range(trace.devices)]
    peaks = [dict.fromkeys((*kinds, TOTAL), 0.0) for _ in range(trace.devices)]
    by_device: list[list[int]] = [[] for _ in range(trace.devices)]
    for index, sample in enumerate(trace.memory):
        if sample.kind in kinds:
            by_device[sample.device].append(index)
    for device, indices in enumerate(by_device):
        now, peak = held[device], peaks[device]
        for position, index in enumerate(indices):
            sample = trace.memory[index]
            now[sample.kind] = sample.bytes
            last = position + 1 == len(indices) or trace.memory[indices[position + 1]].time_s > sample.time_s
            if last:
                for kind in kinds:
                    peak[kind] = max(peak[kind], now[kind])
                peak[TOTAL] = max(peak[TOTAL], sum(now.values()))
    return tuple(peaks)


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
    )


def _summaries(actions: Sequence[ActionError]) -> tuple[KindSummary, ...]:
    groups: dict[Kind, list[ActionError]] = defaultdict(list)
    for item in actions:
        groups[item.action.kind].append(item)
    return tuple(_summary(kind, groups[kind]) for kind in known_kinds() if kind in groups)


def _summary(kind: Kind, actions: Sequence[ActionError]) -> KindSummary:
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
    if not kinds:
        return ()
    both = zip(peak_memory(predicted, kinds), peak_memory(measured, kinds), strict=False)
    return tuple(
        PeakMemory(device, kind, pair(ours[kind], theirs[kind]))
        for device, (ours, theirs) in enumerate(both)
        for kind in (*kinds, TOTAL)
    )


def _order(ours: Mapping[_Key, TraceEvent], theirs: Mapping[_Key, TraceEvent]) -> tuple[OrderDifference, ...]:
    queues = [_queues(one, other) for one, other in ((ours, theirs), (theirs, ours))]
    result = []
    for (device, queue), expected in queues[0].items():
        found = queues[1].get((device, queue), [])
        # The queues of one name can differ in length where a runner names its queues otherwise.
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
    # Sorting is stable: actions that start at one time keep the order issued.
    return {key: [e.action for e in sorted(events, key=lambda e: e.start_s)] for key, events in queues.items()}
