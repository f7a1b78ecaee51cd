"""Time and memory of compute orders without a plan: of schedules, and of searches' results; and the engine's run of a
plan.

An action starts when its device has ended the previous action and all its inputs have arrived; a message is a pure
delay. F reads the outputs of earlier stages; B and I read the stage's own F and the gradients of later stages; W reads
its own I. In this model the times follow from the orders alone (`engine`).

A device runs one action at a time, so the peak of its saved tensors also follows from its order alone
(`memory.held_bytes`).

A stage that recomputes runs its forward again directly before B or I, as soon as the device is free and without waiting
for the gradient: B or I starts when both are available. Orders hold no RECOMPUTE; it is part of its B or I.

The latest times are the same path read from the end: when every action may start without any device ending later.
Delaying all actions to these times at once is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from attrs import frozen

from ..actions import BACKWARD_KINDS, Action, Kind
from ..costs.costs import COMPUTE_SECONDS, Compute, StageCosts, StageEdge, compute_times
from ..errors import RequestError
from ..plan.items import Item, Task
from ..plan.memory import held_bytes, order_changes
from ..plan.memory_policy import TimedCopy, moved
from ..policies.recompute import with_recompute
from ..ratios import bubble_ratio
from ..trace.trace import FROM_HOST_QUEUE, HOST_COPY_QUEUE, TO_HOST_QUEUE
from .engine import Engine, at_once, refuse_cycle

if TYPE_CHECKING:  # schedules are evaluated without loading what plans need
    from ..cluster.cluster import Cluster
    from ..lowering.queues import Queues
    from ..plan.plan import Plan

HopDelay = float | Callable[[int, int, float], float]
"""Delay of a message between two devices: one number for all, or a function of sending device, receiving device and
bytes, such as ``Cluster.transfer_s``. It is not called for two stages on one device: there the delay is 0."""

Times = tuple[tuple[float, ...], ...]
"""Per device a time of each of its actions."""


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
        copy_ends: per device when each of its copies has ended on the host, and back on the device.
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
    copy_ends: tuple[tuple[tuple[float, float], ...], ...] = ()


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
) -> Evaluation:
    """Evaluate compute orders.

    Args:
        device_actions: per device F, I, W and B in order.
        placement: device of every stage.
        costs: per stage.
        edges: the messages between stages; None for a chain, each stage to the next.
        hop_s: delay of a message between two devices.
        recompute: the stages that recompute.
        copies: per device its copies to the host and back; empty for none, or where stages recompute.
        host_queues: host-copy queues of each device: 1 for both directions, or 2.

    Raises:
        RequestError: an action is on another device than its stage, is not a compute action, has an input that no
            device computes, or the orders deadlock (the message shows the cycle).
    """
    again = frozenset(recompute)
    tasks, task_s, numbers = _copy_tasks(device_actions, copies, host_queues)
    engine, compute = _run(device_actions, placement, costs, edges, hop_s, again, tasks, task_s)
    starts, ends = (_of_orders(compute, times, again) for times in zip(*engine.operations, strict=True))
    task_ends = engine.task_ends
    ended = {copy: task_ends[number] for copy, number in numbers.items()}
    busy = tuple(busy_s(actions, costs, again) for actions in device_actions)
    held = [
        held_bytes(order_changes(actions, costs, again), moved(own))
        for actions, own in zip(device_actions, copies or [()] * len(device_actions), strict=True)
    ]
    peaks = [max(own) for own in held]
    makespan = max((end[-1] for end in ends if end), default=0.0)
    stage_span = max((end[-1] - start[0] for start, end in zip(starts, ends, strict=True) if end), default=0.0)
    busiest = max(busy, default=0.0)
    return Evaluation(
        starts=starts,
        ends=ends,
        makespan=makespan,
        stage_span=stage_span,
        bubble_ratio=bubble_ratio(busiest, makespan),
        stage_span_bubble_ratio=bubble_ratio(busiest, stage_span),
        busy=busy,
        peak_memory=tuple(peaks),
        peak_position=tuple(max(own.index(peak) - 1, 0) // 2 for own, peak in zip(held, peaks, strict=True)),
        copy_ends=tuple(
            tuple((ended[device, copy.forward, True], ended[device, copy.forward, False]) for copy in own)
            for device, own in enumerate(copies)
        ),
    )


def _run(
    device_actions: Sequence[Sequence[Action]],
    placement: Sequence[int],
    costs: Sequence[StageCosts],
    edges: Sequence[StageEdge] | None,
    hop_s: HopDelay,
    again: frozenset[int],
    tasks: Sequence[Task] = (),
    task_s: Sequence[float] = (),
) -> tuple[Engine, Compute]:
    """The engine after its run of these orders, and its compute items."""
    if len(placement) != len(costs):
        raise RequestError(f"{len(placement)} stages are placed and {len(costs)} have costs: give one cost for each")
    if edges is None:
        edges = [StageEdge(stage, stage + 1, 1, 1) for stage in range(len(placement) - 1)]
    compute = [with_recompute(actions, again) if again else actions for actions in device_actions]
    positions = positions_of(compute, placement)
    engine = Engine(compute, compute_times(compute, costs), tasks=tasks, task_s=task_s)
    read_inputs(engine, compute, placement, positions, edges, hop_s)
    if not engine.run():
        refuse_cycle(engine, "order")
    return engine, compute


def busy_s(actions: Sequence[Action], costs: Sequence[StageCosts], recompute: Iterable[int] = ()) -> float:
    """Seconds in which a device computes the actions of its order, recomputing included."""
    again, known = frozenset(recompute), dict[tuple[int, Kind], float]()
    for stage, kind in {(action.stage, action.kind) for action in actions}:
        second_s = costs[stage].second_forward_s if stage in again and kind in BACKWARD_KINDS else 0.0
        known[stage, kind] = COMPUTE_SECONDS[kind](costs[stage]) + second_s
    return sum([known[action.stage, action.kind] for action in actions])


def _of_orders(compute: Compute, times: Iterable[Sequence[float]], again: Collection[int]) -> Times:
    """The times of the actions that compute orders hold."""
    if not again:
        return tuple(map(tuple, times))
    return tuple(
        tuple(time for action, time in zip(actions, row, strict=True) if action.kind is not Kind.RECOMPUTE)
        for actions, row in zip(compute, times, strict=True)
    )


ByMicrobatch = list[dict[int | None, int]]
"""By stage and microbatch a position in the order of the stage's device."""
Positions = tuple[ByMicrobatch, ByMicrobatch, list[tuple[int, int, Kind]]]
"""Of F, and of B or I; and device and position of the actions that read one of these of their own stage too early."""


def positions_of(compute: Compute, placement: Sequence[int]) -> Positions:
    """The positions in compute orders.

    Raises:
        RequestError: an action is on another device than its stage, or is not a compute action.
    """
    outputs: ByMicrobatch = [{} for _ in placement]
    gradients: ByMicrobatch = [{} for _ in placement]
    early: list[tuple[int, int, Kind]] = []
    for device, actions in enumerate(compute):
        for position, action in enumerate(actions):
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            if not (stage < len(placement) and placement[stage] == device):
                rule = f"is on device {placement[stage]}" if stage < len(placement) else "does not exist"
                raise RequestError(f"{action} is in the order of device {device}, and its stage {rule}: move it")
            if kind is Kind.F:
                outputs[stage][microbatch] = position
            elif kind is Kind.W:
                if microbatch not in gradients[stage]:
                    early.append((device, position, Kind.B))
            elif kind in BACKWARD_KINDS or kind is Kind.RECOMPUTE:
                if microbatch not in outputs[stage]:
                    early.append((device, position, Kind.F))
                if kind is not Kind.RECOMPUTE:
                    gradients[stage][microbatch] = position
            else:
                raise RequestError(f"{action} is in a compute order: it may hold only F, I, W and B; remove it")
    return outputs, gradients, early


def read_inputs(
    engine: Engine,
    compute: Compute,
    placement: Sequence[int],
    positions: Positions,
    edges: Iterable[StageEdge],
    hop_s: HopDelay,
    first: int = 0,
) -> None:
    """Let every action wait for its inputs, those from other devices as pure delays.

    Args:
        compute: per device F, B, I, W and RECOMPUTE.
        first: the engine's number of the first of these devices.

    Raises:
        RequestError: no device computes an input.
    """
    outputs, gradients, early = positions

    def read(found: ByMicrobatch, source: int, reader: int, size: float, kind: Kind) -> None:
        where, device, computed = placement[source], placement[reader], found[source]
        pairs = [(position, computed.get(microbatch, -1)) for microbatch, position in found[reader].items()]
        for position, issued in pairs:
            if issued < 0:
                _refuse_missing(compute[device][position], device, source, where, kind)
        if where == device:  # what the device has computed before needs no wait
            pairs = [pair for pair in pairs if pair[0] < pair[1]]
        engine.read(first + device, first + where, pairs, hop_delay(hop_s, where, device, size))

    for device, position, kind in early:
        action = compute[device][position]
        source = (outputs if kind is Kind.F else gradients)[action.stage].get(action.microbatch)
        if source is None:
            _refuse_missing(action, device, action.stage, device, kind)
        engine.read(first + device, first + device, [(position, source)], 0.0)
    for edge in edges:
        read(outputs, edge.src, edge.dst, edge.bytes, Kind.F)
        if edge.gradient_bytes > 0:
            read(gradients, edge.dst, edge.src, edge.gradient_bytes, Kind.B)


def _refuse_missing(action: Action, device: int, stage: int, where: int, kind: Kind) -> NoReturn:
    """Raise a RequestError for an action that reads what no device computes."""
    raise RequestError(
        f"{action} on device {device} reads {Action(stage, kind, action.microbatch)}, which no device computes: add it "
        f"to device {where}"
    )


def run_alone(
    plan: Plan,
    queues: Queues,
    seconds: Sequence[Sequence[float]] | None = None,
    cluster: Cluster | None = None,
    task_s: Sequence[float] = (),
) -> tuple[Engine, bool]:
    """The step of a plan in which every transfer has the full bandwidth of its path.

    Args:
        queues: of the lowered plan, of one replica or of all.
        seconds: of every compute item; None if everything takes no time.
        cluster: its devices in the order of ranks; None if messages take no time.
        task_s: duration of each task in seconds.

    Returns:
        The engine after its run, and whether it runs to its end.
    """

    from ..cluster.routing import path_latency_s, path_rate  # of networkx and numpy, which schedules do without

    def hop(src: int, dst: int) -> tuple[float, float]:
        assert cluster is not None
        path = cluster.path(src, dst)
        return path_latency_s(path), path_rate(path)

    if seconds is None:
        seconds, task_s = [[0.0] * len(actions) for actions in queues.compute], [0.0] * len(queues.tasks)
    engine = Engine(queues.compute, seconds, queues.messages, at_once if cluster is None else hop, queues.tasks, task_s)
    own = [edge for edge in plan.edges if plan.placement[edge.src] == plan.placement[edge.dst]]
    if own:  # no message: what is computed too late is waited for without end
        rows = [[action for action in actions if action.kind is not Kind.STEP] for actions in queues.compute]
        one = rows[: plan.devices]
        positions = positions_of(one, plan.placement)
        for first in range(0, len(rows), plan.devices):
            read_inputs(engine, one, plan.placement, positions, own, 0.0, first)
    return engine, engine.run()


Numbers = dict[tuple[int, int, bool], int]
"""Device, position of the F, and whether it goes to the host → number of a copy's task."""


def _copy_tasks(
    device_actions: Sequence[Sequence[Action]], copies: Sequence[Sequence[TimedCopy]], host_queues: int
) -> tuple[list[Task], list[float], Numbers]:
    """The copies as tasks, in the order in which they are issued (``policies/offload``), with their durations."""
    tasks: list[Task] = []
    seconds: list[float] = []
    numbers: Numbers = {}
    for device, own in enumerate(copies):
        issues = [(copy.forward, True, copy.freed_at, copy) for copy in own]
        issues += [(copy.reload_after, False, copy.reader, copy) for copy in own]
        for after, out, awaited, copy in sorted(issues, key=lambda issue: issue[:3]):
            numbers[device, copy.forward, out] = len(tasks)
            waits = () if out else (numbers[device, copy.forward, True],)
            action = device_actions[device][copy.forward]
            moved = Action(action.stage, Kind.OFFLOAD if out else Kind.RELOAD, action.microbatch)
            queue = HOST_COPY_QUEUE if host_queues == 1 else TO_HOST_QUEUE if out else FROM_HOST_QUEUE
            item = Item(device, queue, moved, after + 1, 0, waits)
            tasks.append(Task(moved.kind, "is copied", (item,), ((device, awaited),), (queue, device)))
            seconds.append(copy.out_s if out else copy.back_s)
    return tasks, seconds, numbers


def hop_delay(hop_s: HopDelay, source: int, target: int, size: float) -> float:
    """Delay of a message of this many bytes from one device to another; 0 on one device."""
    if source == target:
        return 0.0
    return hop_s(source, target, size) if callable(hop_s) else hop_s


def latest_times(
    device_actions: Sequence[Sequence[Action]],
    placement: Sequence[int],
    costs: Sequence[StageCosts],
    *,
    edges: Sequence[StageEdge] | None = None,
    hop_s: HopDelay = 0.0,
    recompute: Iterable[int] = (),
) -> tuple[Times, Times]:
    """The latest starts and ends of all actions; arguments as in ``evaluate``."""
    again = frozenset(recompute)
    engine, compute = _run(device_actions, placement, costs, edges, hop_s, again)
    starts, ends = (_of_orders(compute, times, again) for times in zip(*engine.latest(), strict=True))
    return starts, ends
