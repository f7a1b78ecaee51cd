"""Where a search starts: simple patterns on every placement, and the published schedules."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from attrs import define

from ...actions import Kind
from ...errors import InfeasibleError
from ...evaluate.coding import CODE, FORWARD, INPUT, WEIGHT, Floats, Integers
from ...evaluate.compiled import MICROBATCHES_HELD
from ...evaluate.reference import Evaluation
from ...schedules.instance import Instance, instance
from ...schedules.placement import folded_placement, hooked_placement, looped_placement
from ...schedules.problem import Schedule, ScheduleFamily, ScheduleProblem
from ...schedules.scored import exceeds
from ...schedules.tradeoff import named_schedules

W_DELAYS = (0.0, 1.0, 8.0)
"""How long after its I a W is due, in times of one microbatch: at once, soon, or only where nothing else is to do."""
CAP_ROUNDING = (0.0, 0.5, 1.0)
"""Added to a stage's share of the memory before it is rounded down to whole microbatches."""
PACES = ((1.0, 1.0), (2.0, 1.0), (4.0, 2.0))
"""How much longer than an F, and than an I, lies between the passes of neighbouring stages: out, and home."""
FOLDED_PACES = tuple(itertools.product((1.0, 2.0, 3.0), repeat=4))
"""The same for one fold, F out, F home, I out and I home each on its own: building blocks by their four offsets."""
EAGER = 1.5
"""Patience of a start that is a published order: its actions are waited for."""


@define(eq=False)
class State:
    """A point of the search: an instance with what ``decode`` turns into an order.

    Args:
        task: the instance.
        keys, patience, caps, fused: see ``decode``.
        makespan: of the best order seen from here.
    """

    task: Instance
    keys: Floats
    patience: Floats
    caps: Integers
    fused: "np.ndarray"
    makespan: float = float("inf")


def placements(devices: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Round the devices again and again, there and back, and there and back with a hook at the turn."""
    yield looped_placement(devices, chunks)
    if chunks > 1 and devices > 1:
        yield folded_placement(devices, chunks)
    if chunks == 2 and devices > 2:
        yield hooked_placement(devices)


def patterns(task: Instance, most: int | None = None) -> Iterator[State]:
    """Actions due in the rhythm of the busiest device, at several paces; memory shared out by how long it is held.

    Args:
        task: the instance.
        most: how many are wanted, evenly spread over all there are; all of them if None.
    """
    period = float(task.times.sum(axis=0)[task.stages_on].sum(axis=1).max())
    splits = [task.too_large_to_split]
    if np.any(task.backward < task.times[INPUT] + task.times[WEIGHT]) and not splits[0].all():
        splits.append(np.ones(len(task.placement), dtype=np.bool_))
    limited = bool(np.isfinite(task.limits[0]))
    chosen = [
        (fused, rhythm, delay, rounding)
        for fused in splits
        for rhythm in _rhythms(task, limited)
        for delay in (W_DELAYS if not fused.all() else W_DELAYS[:1])
        for rounding in (CAP_ROUNDING if limited else CAP_ROUNDING[:1])
    ]
    for fused, rhythm, delay, rounding in chosen[:: 1 if most is None else -(-len(chosen) // most)]:
        forward, back = _timed(task, period, rhythm)
        caps = _caps(task, fused, back[:, 0] - forward[:, 0] + period, rounding)
        yield State(task, np.stack([forward, back, back + delay * period]), np.full(3, 0.5), caps, fused.copy())


def _rhythms(task: Instance, limited: bool) -> list[tuple[float, ...] | int]:
    """The paces, and the sizes of groups that go round the devices together."""
    devices, chunks = task.problem.devices, task.problem.chunks
    looped = chunks > 1 and tuple(task.placement) == looped_placement(devices, chunks)
    few = PACES if limited and chunks > 1 else PACES[:1]
    paces: list[tuple[float, ...]] = [(out, home, out, home) for out, home in few]
    if limited and chunks == 2 and not looped:
        paces = list(dict.fromkeys([*paces, *FOLDED_PACES]))
    return [*paces, *(dict.fromkeys((devices, -(-devices // 2))) if looped else ())]


def _timed(task: Instance, period: float, rhythm: tuple[float, ...] | int) -> tuple[Floats, Floats]:
    """When F and I of every stage and microbatch are due, (stages, microbatches) each."""
    if isinstance(rhythm, int):
        return _grouped(task, period, rhythm)
    turn = np.arange(task.problem.microbatches) * period
    forward, back = _due(task, *rhythm)
    return forward[:, None] + turn, back[:, None] + turn


def _grouped(task: Instance, period: float, group: int) -> tuple[Floats, Floats]:
    """Groups of microbatches go round the devices together, as in interleaved 1F1B and GIS (PipeOffload, section 4)."""
    chunks, devices = task.problem.chunks, task.problem.devices
    chunk, device = np.divmod(np.arange(len(task.placement)), devices)
    number, place = np.divmod(np.arange(task.problem.microbatches), group)
    turn = (number * group + place / chunks) * period
    hop = task.problem.hop_s
    lap = group * period / chunks
    forward = chunk * lap + device * (task.times[FORWARD] + hop)
    back = forward[-1] + (chunks - 1 - chunk) * lap + (devices - device) * (task.times[INPUT] + hop)
    return forward[:, None] + turn, back[:, None] + turn


def _due(
    task: Instance, forward_out: float, forward_home: float, back_out: float, back_home: float
) -> tuple[Floats, Floats]:
    """When the first microbatch's F and I are due: ``out`` on chunks of even number for F, of odd number for I.

    On a folded placement that is the way out and the way home of a microbatch; on the way of the gradient the roles
    change (Controllable Memory, section 3: the offsets δ0 and δ1).
    """
    even = np.arange(len(task.placement)) // task.problem.devices % 2 == 0
    forward = np.cumsum(task.times[FORWARD] * np.where(even, forward_out, forward_home) + task.hops)
    hops = np.append(task.hops[1:], 0.0)
    back = np.cumsum((task.times[INPUT] * np.where(even, back_home, back_out) + hops)[::-1])[::-1]
    return forward, forward[-1] + back


def _caps(task: Instance, fused: "np.ndarray", life: Floats, rounding: float) -> Integers:
    """Microbatches that each stage may hold: its share of the device's memory by how long it holds one."""
    count = task.problem.microbatches
    caps = np.full(len(task.placement), count, dtype=np.int64)
    for device, own in enumerate(task.stages_on):
        unit = np.maximum(task.fused_need(fused)[own], 1e-300)
        if np.isfinite(task.limits[device]):
            with np.errstate(over="ignore"):  # what saves nothing is held as often as there is to hold
                held = np.maximum(life[own], 1e-300)
                share = held / held.sum() * task.limits[device] / unit
            caps[own] = np.clip(np.floor(np.minimum(share, count) + rounding), 1, count)
    return caps


def published(
    problem: ScheduleProblem, families: Iterable[ScheduleFamily]
) -> tuple[list[State], list[tuple[Schedule, Evaluation]]]:
    """The named schedules as starts, and those within the limit as they are."""
    states, found = [], []
    for scored in named_schedules(problem, families):
        task = instance(problem, scored.schedule.placement)
        if holds_one(task):
            states.append(state_of(task, scored.schedule, scored.result))
        if not exceeds(scored):
            found.append((scored.schedule, scored.result))
    return states, found


def state_of(task: Instance, schedule: Schedule, result: Evaluation) -> State:
    """An order as a start: every action is due when it began there."""
    stages, count = len(task.placement), task.problem.microbatches
    keys = np.zeros((3, stages, count))
    fused = np.ones(stages, dtype=np.bool_)
    held, caps = np.zeros(stages, dtype=np.int64), np.ones(stages, dtype=np.int64)
    for order, starts in zip(schedule.device_actions, result.starts, strict=True):
        for action, at in zip(order, starts, strict=True):
            assert action.microbatch is not None
            stage, kind = action.stage, action.kind
            keys[INPUT if kind is Kind.B else CODE[kind], stage, action.microbatch] = at
            if kind is Kind.I:
                fused[stage] = False
            held[stage] += MICROBATCHES_HELD[CODE[kind]]
            caps[stage] = max(caps[stage], held[stage])
    return State(task, keys, np.full(3, EAGER), caps, fused | task.too_large_to_split)


def holds_one(task: Instance) -> bool:
    """Whether the limit holds one microbatch on all stages of a device: then there is an order (see ``decode``)."""
    return task.least_memory <= float(task.limits[0])


def enough_memory(problems: Sequence[ScheduleProblem]) -> list[Instance]:
    """Every problem with every placement, those that one microbatch fits in.

    Raises:
        InfeasibleError: none; the message names the least limit that would do.
    """
    tasks = [instance(p, placement) for p in problems for placement in placements(p.devices, p.chunks)]
    left = [task for task in tasks if holds_one(task)]
    if not left:
        task = min(tasks, key=lambda t: t.least_memory)
        raise InfeasibleError(
            f"the memory limit is {task.problem.memory_limit:g} and one microbatch on every stage of a device takes "
            f"{task.least_memory:g}: raise the limit to at least that, or use more devices"
        )
    return left
