"""The keys of list-scheduled orders: simple patterns on every placement."""

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
        for pace in (PACES if limited and task.problem.chunks > 1 else PACES[:1])
        for delay in (W_DELAYS if not fused.all() else W_DELAYS[:1])
        for rounding in (CAP_ROUNDING if limited else CAP_ROUNDING[:1])
    ]
    for fused, pace, delay, rounding in chosen[:: 1 if most is None else -(-len(chosen) // most)]:
        turn, (forward, back) = np.arange(task.problem.microbatches) * period, _first_due(task, *pace)
        forward, back = forward[:, None] + turn, back[:, None] + turn
        caps = _caps(task, fused, back[:, 0] - forward[:, 0] + period, rounding)
        keys = np.stack([forward, back, back + delay * period])
        yield Priorities(keys, np.full(3, 0.5), caps, fused.copy())


def _first_due(task: Instance, even_pace: float, odd_pace: float) -> tuple[Floats, Floats]:
    """When the first microbatch's F and I are due, with one offset for chunks of even and one for chunks of odd number.

    On a folded placement an even chunk leads from the first device to the last, and an odd chunk back to the first
    (Controllable Memory, section 3: the offsets δ0 and δ1).
    """
    even = np.arange(len(task.placement)) // task.problem.devices % 2 == 0
    forward = np.cumsum(task.times[FORWARD] * np.where(even, even_pace, odd_pace) + task.hops)
    hops = np.append(task.hops[1:], 0.0)
    back = np.cumsum((task.times[INPUT] * np.where(even, odd_pace, even_pace) + hops)[::-1])[::-1]
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


def instances_that_fit(problems: Sequence[ScheduleProblem]) -> list[Instance]:
    """Each problem on each placement, if one microbatch fits on all stages of a device: then ``decode`` finds an order.

    Raises:
        InfeasibleError: nothing fits; the message names the smallest sufficient limit.
    """
    tasks = [instance(p, placement) for p in problems for placement in placements(p.devices, p.chunks)]
    left = [task for task in tasks if task.least_memory <= float(task.limits[0])]
    if not left:
        task = min(tasks, key=lambda t: t.least_memory)
        raise InfeasibleError(
            f"the memory limit is {task.problem.memory_limit:g} and one microbatch on every stage of a device takes "
            f"{task.least_memory:g}: raise the limit to at least that, or use more devices"
        )
    return left
