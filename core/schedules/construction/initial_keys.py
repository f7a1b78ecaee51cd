"""The keys of list-scheduled orders: simple patterns on every placement."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ...errors import InfeasibleError
from ...timing.coding import FORWARD, INPUT, WEIGHT, Floats, Integers
from ..problem import ScheduleProblem, folded_placement, hooked_placement, looped_placement
from .list_scheduler import Instance, Priorities, instance

W_DELAYS = (0.0, 1.0, 8.0)
"""How long after its I a W is due, in times of one microbatch: at once, soon, or only when the device is idle."""
CAP_ROUNDING = (0.0, 0.5, 1.0)
"""Added to a stage's share of the memory before it is rounded down to whole microbatches."""
PACES = ((1.0, 1.0), (2.0, 1.0), (4.0, 2.0))
"""Offset between the passes of neighbouring stages, in times of an F or an I: on chunks of even number, of odd
number."""
FOLDED_PACES = tuple(itertools.product((1.0, 2.0, 3.0), repeat=4))
"""The same on a folded placement, with four separate offsets (F and I, even and odd chunks), as in a building block."""


def placements(devices: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """The looped placement, and, if they exist for this size, the folded and the hooked one."""
    yield looped_placement(devices, chunks)
    if chunks > 1 and devices > 1:
        yield folded_placement(devices, chunks)
    if chunks == 2 and devices > 2:
        yield hooked_placement(devices)


def patterns(task: Instance, most: int | None = None) -> Iterator[Priorities]:
    """Keys that repeat with the busiest device's time per microbatch, at several paces.

    Stages share a device's memory in proportion to how long each holds a microbatch.

    Args:
        most: how many to return, evenly spaced among all; None for all.
    """
    period = float(task.times.sum(axis=0)[task.stages_on].sum(axis=1).max())
    splits = [task.too_large_to_split]
    if np.any(task.backward < task.times[INPUT] + task.times[WEIGHT]) and not splits[0].all():
        splits.append(np.ones(len(task.placement), dtype=np.bool_))
    limited = bool(np.isfinite(task.limits[0]))
    chosen = [
        (fused, pace, delay, rounding)
        for fused in splits
        for pace in _paces(task, limited)
        for delay in (W_DELAYS if not fused.all() else W_DELAYS[:1])
        for rounding in (CAP_ROUNDING if limited else CAP_ROUNDING[:1])
    ]
    for fused, pace, delay, rounding in chosen[:: 1 if most is None else -(-len(chosen) // most)]:
        forward, back = _due_times(task, period, pace)
        caps = _caps(task, fused, back[:, 0] - forward[:, 0] + period, rounding)
        keys = np.stack([forward, back, back + delay * period])
        yield Priorities(keys, np.full(3, 0.5), caps, fused.copy())


def _paces(task: Instance, limited: bool) -> list[tuple[float, ...] | int]:
    """Offsets between stages (four numbers), or numbers of microbatches that pass through the chunks as a group."""
    devices, chunks = task.problem.devices, task.problem.chunks
    looped = chunks > 1 and tuple(task.placement) == looped_placement(devices, chunks)
    few = PACES if limited and chunks > 1 else PACES[:1]
    paces: list[tuple[float, ...]] = [(even, odd, even, odd) for even, odd in few]
    if limited and chunks == 2 and not looped:
        paces = list(dict.fromkeys([*paces, *FOLDED_PACES]))
    return [*paces, *(dict.fromkeys((devices, -(-devices // 2))) if looped else ())]


def _due_times(task: Instance, period: float, pace: tuple[float, ...] | int) -> tuple[Floats, Floats]:
    """When F and I of every stage and microbatch are due, (stages, microbatches) each."""
    if isinstance(pace, int):
        return _grouped(task, period, pace)
    turn = np.arange(task.problem.microbatches) * period
    forward, back = _first_due(task, *pace)
    return forward[:, None] + turn, back[:, None] + turn


def _grouped(task: Instance, period: float, group: int) -> tuple[Floats, Floats]:
    """A group of microbatches passes a chunk of all devices, then the next chunk, as in interleaved 1F1B and GIS
    (PipeOffload, section 4)."""
    chunks, devices = task.problem.chunks, task.problem.devices
    chunk, device = np.divmod(np.arange(len(task.placement)), devices)
    number, place = np.divmod(np.arange(task.problem.microbatches), group)
    turn = (number * group + place / chunks) * period
    hop = task.problem.hop_s
    lap = group * period / chunks
    forward = chunk * lap + device * (task.times[FORWARD] + hop)
    back = forward[-1] + (chunks - 1 - chunk) * lap + (devices - device) * (task.times[INPUT] + hop)
    return forward[:, None] + turn, back[:, None] + turn


def _first_due(
    task: Instance, forward_even: float, forward_odd: float, back_odd: float, back_even: float
) -> tuple[Floats, Floats]:
    """When the first microbatch's F and I are due, with one offset for chunks of even and one for chunks of odd number.

    On a folded placement an even chunk leads from the first device to the last, and an odd chunk back to the first
    (Controllable Memory, section 3: the offsets δ0 and δ1).
    """
    even = np.arange(len(task.placement)) // task.problem.devices % 2 == 0
    forward = np.cumsum(task.times[FORWARD] * np.where(even, forward_even, forward_odd) + task.hops)
    hops = np.append(task.hops[1:], 0.0)
    back = np.cumsum((task.times[INPUT] * np.where(even, back_even, back_odd) + hops)[::-1])[::-1]
    return forward, forward[-1] + back


def _caps(task: Instance, fused: "np.ndarray", life: Floats, rounding: float) -> Integers:
    """Microbatches that each stage may hold.

    A stage's share of its device's memory is in proportion to ``life``, how long it holds one microbatch.
    """
    count = task.problem.microbatches
    caps = np.full(len(task.placement), count, dtype=np.int64)
    for device, own in enumerate(task.stages_on):
        unit = np.maximum(task.fused_need(fused)[own], 1e-300)
        if np.isfinite(task.limits[device]):
            with np.errstate(over="ignore"):  # a stage that saves nothing may hold all microbatches
                held = np.maximum(life[own], 1e-300)
                share = held / held.sum() * task.limits[device] / unit
            caps[own] = np.clip(np.floor(np.minimum(share, count) + rounding), 1, count)
    return caps


def fits_one_microbatch(task: Instance) -> bool:
    """Whether one microbatch fits on all stages of a device at once; then ``decode`` finds an order."""
    return task.least_memory <= float(task.limits[0])


def instances_that_fit(problems: Sequence[ScheduleProblem]) -> list[Instance]:
    """Each problem on each placement, if at least one microbatch fits.

    Raises:
        InfeasibleError: nothing fits; the message names the smallest sufficient limit.
    """
    tasks = [instance(p, placement) for p in problems for placement in placements(p.devices, p.chunks)]
    left = [task for task in tasks if fits_one_microbatch(task)]
    if not left:
        task = min(tasks, key=lambda t: t.least_memory)
        raise InfeasibleError(
            f"the memory limit is {task.problem.memory_limit:g} and one microbatch on every stage of a device takes "
            f"{task.least_memory:g}: raise the limit to at least that, or use more devices"
        )
    return left
