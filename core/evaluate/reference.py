"""Time and memory of compute orders by longest path, without contention: the oracle of searches.

An action starts when its device has ended the previous action and all its inputs have arrived; a message is a pure
delay. F reads the outputs of earlier stages; B and I read the stage's own F and the gradients of later stages; W reads
its own I. In this model the times follow from the orders alone, so one pass computes them.

A device runs one action at a time, so the peak of its saved tensors also follows from its order alone
(`host_queue.device_bytes`).

A stage that recomputes runs its forward again directly before B or I, as soon as the device is free and without waiting
for the gradient: B or I starts when both are available. Orders hold no RECOMPUTE; it is part of its B or I.

The latest times are the same path read from the end: when every action may start without any device ending later.
Delaying all actions to these times at once is possible.
"""

from collections.abc import Callable, Iterable, Sequence

from attrs import frozen

from ..actions import BACKWARD_KINDS, Action, Kind
from ..costs.costs import StageCosts, StageEdge
from ..errors import RequestError
from ..ratios import bubble_ratio
from .coding import BOTH, CODE, FORWARD, INPUT, KIND
from .host_queue import CollectiveQueue, HostQueue, TimedCopy, device_bytes

HopDelay = float | Callable[[int, int, float], float]
"""Delay of a message between two devices: one number for all, or a function of sending device, receiving device and
bytes, such as ``Cluster.transfer_s``. It is not called for two stages on one device: there the delay is 0."""


_Ends = list[float | None]
_Read = tuple[_Ends, float, int]


@frozen
class Evaluation:
    """Time and memory of a compute order, in the units of its costs.

    Args:
        starts, ends: per device, of each of its actions.
        makespan: end of the last action.
        stage_span: the largest time over devices from the start of its first to the end of its last action.
        bubble_ratio: 1 − busiest device's busy time ÷ makespan.
        stage_span_bubble_ratio: the same over ``stage_span``, as the Zero Bubble paper defines it.
        busy: per device, the time it computes, recomputing included.
        peak_memory: per device, the most saved tensors it holds.
        peak_position: per device, the position in its order of the action that reaches the peak.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    stage_span: float
    bubble_ratio: float
    stage_span_bubble_ratio: float
    busy: tuple[float, ...]
    peak_memory: tuple[float, ...]
    peak_position: tuple[int, ...]


def evaluate(
    device_actions: Sequence[Sequence[Action]],
    placement: Sequence[int],
    costs: Sequence[StageCosts],
    *,
    edges: Sequence[StageEdge] | None = None,
    hop_s: HopDelay = 0.0,
    recompute: Iterable[int] = (),
    copies: Sequence[Sequence[TimedCopy]] = (),
    host_queues: int = 1,
    collectives: Sequence[CollectiveQueue] = (),
) -> Evaluation:
    """Evaluate compute orders once; for many orders of the same stages keep an ``Evaluator``.

    Args:
        device_actions: per device F, I, W and B in order.
        placement: device of every stage.
        costs: per stage.
        edges: the messages between stages; None for a chain, each stage to the next.
        hop_s: delay of a message between two devices.
        recompute: the stages that recompute.
        copies: per device its copies to the host and back; empty for none.
        host_queues: host-copy queues of each device: 1 for both directions, or 2.
        collectives: per device what its replicas sum or gather within the step, not yet begun; empty for none.

    Raises:
        RequestError: an action is on another device than its stage, is not a compute action, has an input that no
            device computes, or the orders deadlock (the message shows the cycle).
    """
    evaluator = Evaluator(placement, costs, edges=edges, hop_s=hop_s, recompute=recompute)
    return evaluator.evaluate(device_actions, copies, host_queues, collectives)


class Evaluator:
    """Evaluates many compute orders of the same stages on the same devices. Arguments as in ``evaluate``."""

    def __init__(
        self,
        placement: Sequence[int],
        costs: Sequence[StageCosts],
        *,
        edges: Sequence[StageEdge] | None = None,
        hop_s: HopDelay = 0.0,
        recompute: Iterable[int] = (),
    ) -> None:
        if len(placement) != len(costs):
            raise RequestError(
                f"{len(placement)} stages are placed and {len(costs)} have costs: give one cost for each"
            )
        self.placement = tuple(placement)
        if edges is None:
            edges = [StageEdge(stage, stage + 1, 1, 1) for stage in range(len(placement) - 1)]
        self._forward_from: list[list[tuple[int, float]]] = [[] for _ in placement]
        self._gradient_from: list[list[tuple[int, float]]] = [[] for _ in placement]
        for edge in edges:
            delay = hop_delay(hop_s, placement[edge.src], placement[edge.dst], edge.bytes)
            self._forward_from[edge.dst].append((edge.src, delay))
            if edge.gradient_bytes > 0:
                delay = hop_delay(hop_s, placement[edge.dst], placement[edge.src], edge.gradient_bytes)
                self._gradient_from[edge.src].append((edge.dst, delay))
        self._costs, self._recompute = costs, frozenset(recompute)
        # By kind and stage: the time, and the recomputation before the wait.
        self._time = (
            [cost.forward_s for cost in costs],
            [cost.backward_input_s for cost in costs],
            [cost.backward_weight_s for cost in costs],
            [cost.full_backward_s for cost in costs],
        )
        nothing = [0.0 for _ in costs]
        second = [cost.second_forward_s if stage in self._recompute else 0.0 for stage, cost in enumerate(costs)]
        self._before = (nothing, second, nothing, second)

    def evaluate(
        self,
        device_actions: Sequence[Sequence[Action]],
        copies: Sequence[Sequence[TimedCopy]] = (),
        host_queues: int = 1,
        collectives: Sequence[CollectiveQueue] = (),
    ) -> Evaluation:
        """Time and memory of these orders. Arguments and errors as in ``evaluate``."""
        codes = self._encode(device_actions)
        starts, ends = self._run(codes, [HostQueue(own, host_queues) if own else None for own in copies], collectives)
        times, before = self._time, self._before
        busy = [sum([times[kind][stage] + before[kind][stage] for kind, stage, _ in order]) for order in codes]
        peaks = [
            _peak(device_bytes(order, self._costs, self._recompute, copies[device] if copies else ()))
            for device, order in enumerate(device_actions)
        ]
        makespan = max((end[-1] for end in ends if end), default=0.0)
        stage_span = max((end[-1] - start[0] for start, end in zip(starts, ends, strict=True) if end), default=0.0)
        busiest = max(busy, default=0.0)
        return Evaluation(
            starts=tuple(map(tuple, starts)),
            ends=tuple(map(tuple, ends)),
            makespan=makespan,
            stage_span=stage_span,
            bubble_ratio=bubble_ratio(busiest, makespan),
            stage_span_bubble_ratio=bubble_ratio(busiest, stage_span),
            busy=tuple(busy),
            peak_memory=tuple(peak for peak, _ in peaks),
            peak_position=tuple(position for _, position in peaks),
        )

    def _encode(self, device_actions: Sequence[Sequence[Action]]) -> list[list[tuple[int, int, int]]]:
        """Actions as (kind, stage, microbatch) in small integers, which the inner loop reads fastest."""
        placement = self.placement
        stages = len(placement)
        codes = []
        for device, order in enumerate(device_actions):
            row = []
            for action in order:
                kind = CODE.get(action.kind)
                stage = action.stage
                if kind is None or action.microbatch is None:
                    raise RequestError(f"{action} is in a compute order: it may hold only F, I, W and B; remove it")
                if not (stage < stages and placement[stage] == device):
                    rule = f"is on device {placement[stage]}" if stage < stages else "does not exist"
                    raise RequestError(f"{action} is in the order of device {device}, and its stage {rule}: move it")
                row.append((kind, stage, action.microbatch))
            codes.append(row)
        return codes

    def _run(
        self,
        codes: list[list[tuple[int, int, int]]],
        host: Sequence[HostQueue | None],
        collectives: Sequence[CollectiveQueue] = (),
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Start and end of every action.

        Each device runs until an input is missing; the action that computes the input resumes it.
        """
        count = 1 + max((code[2] for order in codes for code in order), default=-1)
        reads, gives = self._tables(count)
        times, before = self._time, self._before
        starts: list[list[float]] = [[] for _ in codes]
        ends: list[list[float]] = [[] for _ in codes]
        waiting: dict[tuple[int, int], list[int]] = {}
        ready = list(range(len(codes)))
        while ready:
            device = ready.pop()
            device_starts, device_ends = starts[device], ends[device]
            now = device_ends[-1] if device_ends else 0.0
            copies = host[device] if host else None
            shared = collectives[device] if collectives else None
            for kind, stage, microbatch in codes[device][len(device_ends) :]:
                if copies is not None:
                    now = max(now, copies.ready_s(len(device_ends)))
                start = now + before[kind][stage]
                if shared is not None:
                    start = max(start, shared.ready_s(len(device_ends)))
                for row, delay, name in reads[kind][stage]:
                    end = row[microbatch]
                    if end is None:
                        waiting.setdefault((name, microbatch), []).append(device)
                        break
                    if end + delay > start:  # noqa: PLR1730 - max() costs a tenth of the whole pass
                        start = end + delay
                else:
                    now = start + times[kind][stage]
                    device_starts.append(start)
                    device_ends.append(now)
                    if copies is not None:
                        copies.issue(len(device_ends) - 1, now)
                    if shared is not None:
                        shared.issue(len(device_ends) - 1, now)
                    row, name = gives[kind][stage]
                    row[microbatch] = now
                    if waiting:
                        ready += waiting.pop((name, microbatch), ())
                    continue
                break
        if waiting:
            raise RequestError(_deadlock(codes, [len(end) for end in ends], waiting, self.placement))
        return starts, ends

    def _tables(self, count: int) -> tuple[list[list[list[_Read]]], list[list[tuple[_Ends, int]]]]:
        """By kind and stage: the inputs and the output of an action, as rows of end times by microbatch.

        A row's name is twice its stage, plus 1 for gradients; that of W, which no action reads, is −1.
        """
        stages = range(len(self.placement))
        outputs: list[_Ends] = [[None] * count for _ in stages]
        gradients: list[_Ends] = [[None] * count for _ in stages]
        forward = [[(outputs[src], delay, 2 * src) for src, delay in self._forward_from[stage]] for stage in stages]
        backward = [
            [(outputs[stage], 0.0, 2 * stage)]
            + [(gradients[src], delay, 2 * src + 1) for src, delay in self._gradient_from[stage]]
            for stage in stages
        ]
        weight = [[(gradients[stage], 0.0, 2 * stage + 1)] for stage in stages]
        gives_output = [(outputs[stage], 2 * stage) for stage in stages]
        gives_gradient = [(gradients[stage], 2 * stage + 1) for stage in stages]
        gives_nothing: list[tuple[_Ends, int]] = [([None] * count, -1) for _ in stages]
        return [forward, backward, weight, backward], [gives_output, gives_gradient, gives_nothing, gives_gradient]


def _peak(held: Iterable[tuple[float, float]]) -> tuple[float, int]:
    """The most saved tensors that a device holds, and the position of the action that reaches it."""
    peak, where = 0.0, 0
    for position, (running, after) in enumerate(held):
        most = max(running, after)
        if most > peak:
            peak, where = most, position
    return peak, where


def hop_delay(hop_s: HopDelay, source: int, target: int, size: float) -> float:
    """Delay of a message of this many bytes from one device to another; 0 on one device."""
    if source == target:
        return 0.0
    return hop_s(source, target, size) if callable(hop_s) else hop_s


def _deadlock(
    codes: list[list[tuple[int, int, int]]],
    positions: list[int],
    waiting: dict[tuple[int, int], list[int]],
    placement: tuple[int, ...],
) -> str:
    """The cycle of waits: from a blocked device to the one that has not yet run its input, until one recurs."""
    wanted = {
        device: (BOTH if name % 2 else FORWARD, name // 2, microbatch)
        for (name, microbatch), devices in waiting.items()
        for device in devices
    }
    device = min(wanted)
    path: list[int] = []
    while device not in path:
        path.append(device)
        kind, stage, microbatch = wanted[device]
        given = (INPUT, BOTH) if kind == BOTH else (kind,)
        owner = placement[stage]
        left = codes[owner][positions[owner] :] if owner < len(codes) else []
        if not any(code[0] in given and code[1:] == (stage, microbatch) for code in left):
            reader = _text(codes[device][positions[device]])
            return (
                f"{reader} on device {device} reads {_text(wanted[device])}, which no device computes: "
                f"add it to device {owner}"
            )
        device = owner
    steps = []
    for stuck in path[path.index(device) :]:
        owner = placement[wanted[stuck][1]]
        steps.append(
            f"{_text(codes[stuck][positions[stuck]])} on device {stuck} waits for {_text(wanted[stuck])}, "
            f"which is after {_text(codes[owner][positions[owner]])} on device {owner}"
        )
    return "deadlock: " + "; ".join(steps)


def _text(code: tuple[int, int, int]) -> str:
    kind, stage, microbatch = code
    return f"{stage}{KIND[kind]}{microbatch}"


Times = tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]
"""Per device the starts and the ends of its actions."""

_Key = tuple[bool, int, int | None]
"""(whether it is an F, stage, microbatch) of an F, B or I: what other actions read."""


def latest_times(
    device_actions: Sequence[Sequence[Action]],
    placement: Sequence[int],
    costs: Sequence[StageCosts],
    result: Evaluation,
    *,
    edges: Sequence[StageEdge],
    hop_s: HopDelay = 0.0,
    recompute: Sequence[int] = (),
) -> Times:
    """The latest times; arguments as in ``evaluate``, with its result for these orders.

    The start of an action that recomputes first is that of its B or I, as in ``evaluate``.
    """
    forward_to: list[list[tuple[int, float]]] = [[] for _ in costs]
    gradient_to: list[list[tuple[int, float]]] = [[] for _ in costs]
    for edge in edges:
        forward_to[edge.src].append((edge.dst, hop_delay(hop_s, placement[edge.src], placement[edge.dst], edge.bytes)))
        if edge.gradient_bytes > 0:
            delay = hop_delay(hop_s, placement[edge.dst], placement[edge.src], edge.gradient_bytes)
            gradient_to[edge.dst].append((edge.src, delay))
    latest: dict[_Key, float] = {}  # start of F, B and I
    starts = [list(row) for row in result.starts]
    ends = [list(row) for row in result.ends]
    free = [row[-1] if row else 0.0 for row in ends]  # the latest end of the next action, read from the end
    left = [len(order) for order in device_actions]
    progressed = True
    while progressed:
        progressed = False
        for device, order in enumerate(device_actions):
            while left[device]:
                action = order[left[device] - 1]
                end = free[device]
                if action.kind is not Kind.W:
                    targets = (forward_to if action.kind is Kind.F else gradient_to)[action.stage]
                    keys = [((action.kind is Kind.F, stage, action.microbatch), delay) for stage, delay in targets]
                    if any(key not in latest for key, _ in keys):
                        break
                    end = min([end, *(latest[key] - delay for key, delay in keys)])
                left[device] -= 1
                at, progressed = left[device], True
                starts[device][at], ends[device][at] = end - (ends[device][at] - starts[device][at]), end
                free[device] = starts[device][at]
                if action.kind is not Kind.W:
                    latest[action.kind is Kind.F, action.stage, action.microbatch] = starts[device][at]
                if action.stage in recompute and action.kind in BACKWARD_KINDS:
                    free[device] -= costs[action.stage].second_forward_s
    return tuple(map(tuple, starts)), tuple(map(tuple, ends))
