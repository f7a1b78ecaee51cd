"""Free placement: every operator is a stage of its own and may be on any device; then stages are joined again.

The order of a plan's operators is at least as fast as the order of its stages and holds no more, because each of their
actions is a sequence of the operators' actions. It has more freedom: operators move between devices one by one, so
devices get unequal numbers of stages, in any order along the pipeline.

Where nothing else fits, `packed` looks for devices of operators with which one microbatch at a time fits in all memory.
An order that ends each microbatch before the next one holds the least. A device then needs the state of its operators,
and at most the saved tensors up to one of them plus the workspace of that one. So operators are assigned one after
another, in depth-first order, and an assignment ends where a device needs more than it may hold.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...numba_cache import njit
from ...schedules.meaning import PACKED
from ...timing.coding import BOTH, FORWARD, INPUT, KINDS, WEIGHT, Integers, order_arrays
from ..problem.arrays import SAVED, STATE
from ..problem.candidate import Candidate
from ..problem.setting import Setting
from .walk import Walk

ROUNDING = 1e-9
"""Share of the step by which a longer one counts as equal."""


def refined(walk: Walk) -> Walk:
    """The walk with one stage for each operator."""
    candidate, count = walk.best, walk.setting.microbatches
    sizes, cuts = np.diff(candidate.cuts), candidate.cuts.tolist()
    rows = []
    for row, length in zip(candidate.orders, candidate.lengths, strict=True):
        split: list[int] = []
        for code in row[:length].tolist():
            kind, (stage, microbatch) = code & 3, divmod(code >> 2, count)
            operators = range(cuts[stage], cuts[stage + 1])
            for operator in operators if kind == FORWARD else reversed(operators):
                first = KINDS * (operator * count + microbatch)
                split += (first + INPUT, first + WEIGHT) if kind == BOTH else (first + kind,)
        rows.append(split)
    orders, lengths = order_arrays(rows, 3 * cuts[-1] * count)
    stages = np.arange(cuts[-1] + 1)
    new = Candidate(
        np.repeat(candidate.placement, sizes), stages, np.repeat(candidate.recompute, sizes), orders, lengths
    )
    return _with(walk, new)


def joined(walk: Walk) -> Walk:
    """The walk with neighbouring stages of a device joined where the step does not get longer."""
    best, stage = walk, 0
    while stage + 1 < len(best.best.placement):
        placement, recompute = best.best.placement, best.best.recompute
        if placement[stage] == placement[stage + 1] and recompute[stage] == recompute[stage + 1]:
            found = next((each for each in _joined_at(best, stage) if _no_worse(each, best)), None)
            if found is not None:
                best.free_buffers()
                best = found
                continue
        stage += 1
    return best


def _joined_at(walk: Walk, stage: int) -> list[Walk]:
    """The walk with a stage joined with the next one: both actions run at the place of the later or the earlier one."""
    candidate, count = walk.best, walk.setting.microbatches
    device = candidate.placement[stage]
    result = []
    for late in (True, False):
        rows = [row[:length].tolist() for row, length in zip(candidate.orders, candidate.lengths, strict=True)]
        seen: set[int] = set()
        kept: list[int] = []
        for code in reversed(rows[device]) if late else rows[device]:
            own = (code >> 2) // count
            joint = code - KINDS * count * (own == stage + 1)
            if own in (stage, stage + 1) and joint in seen:
                continue
            seen.add(joint)
            kept.append(joint)
        rows[device] = kept[::-1] if late else kept
        fewer = KINDS * count
        rows = [[code - fewer * ((code >> 2) // count > stage) for code in row] for row in rows]
        orders, lengths = order_arrays(rows, candidate.orders.shape[1])
        without = np.delete(np.arange(len(candidate.placement)), stage + 1)
        cuts = np.delete(candidate.cuts, stage + 1)
        result.append(
            _with(walk, Candidate(candidate.placement[without], cuts, candidate.recompute[without], orders, lengths))
        )
    return result


def _no_worse(new: Walk, old: Walk) -> bool:
    new.evaluate()
    return 0 <= new.step_s <= old.step_s * (1 + ROUNDING) and new.excess <= old.excess


def _with(walk: Walk, candidate: Candidate) -> Walk:
    """The walk with another candidate, not yet evaluated."""
    chunks = -(-len(candidate.placement) // walk.setting.devices)
    return Walk(walk.setting, walk.schedule, chunks, candidate, walk.offload, walk.annealed, walk.recomputes)


VISITED = 300_000
"""Largest number of assignments of one operator that are tried: some hundredths of a second."""
FULL = 0.9
"""Ascending order of devices: the share of a device's part of the work from which the next one is tried first."""


def packed(setting: Setting) -> Iterator[Walk]:
    """Walks whose order runs one microbatch after another, on devices that fit; none if none are found.

    Args:
        setting: with operators that are not cut into stages yet.
    """
    arrays, kinds = setting.arrays, setting.machine.kind
    seen: set[bytes] = set()
    for spread in (False, True):
        device_of = np.full(arrays.sums.shape[2] - 1, -1, dtype=np.int64)
        if len(device_of) < setting.devices:
            return
        fits = _assign(arrays.sums, arrays.largest, kinds, setting.machine.limits, spread, VISITED, device_of)
        if fits:
            _fill_empty(device_of, setting.devices)
        if fits and device_of.tobytes() not in seen:
            seen.add(device_of.tobytes())
            runs = np.flatnonzero(np.diff(device_of)) + 1  # each run of operators on one device as a stage
            walk = one_by_one(setting, device_of, runs)
            walk.evaluate()
            walk.free_buffers()
            # A stage saves all of its tensors at its start; its operators may need less.
            yield walk if walk.excess == 0 else one_by_one(setting, device_of, np.arange(1, len(device_of)))


def _fill_empty(device_of: Integers, devices: int) -> None:
    """Give each device without operators one of the device that has most."""
    for device in range(devices):
        counts = np.bincount(device_of, minlength=devices)
        if not counts[device]:
            device_of[np.flatnonzero(device_of == counts.argmax())[-1]] = device


def one_by_one(setting: Setting, device_of: Integers, inner: Integers) -> Walk:
    """A walk that ends each microbatch before the next one, with stages between the ``inner`` cuts."""
    cuts = np.concatenate([[0], inner, [len(device_of)]]).astype(np.int64)
    placement, count = device_of[cuts[:-1]], setting.microbatches
    stages = len(placement)
    rows: list[list[int]] = [[] for _ in range(setting.devices)]
    for microbatch in range(count):
        for stage in range(stages):
            rows[placement[stage]].append(KINDS * (stage * count + microbatch) + FORWARD)
        for stage in reversed(range(stages)):
            code = KINDS * (stage * count + microbatch)
            rows[placement[stage]] += (code + INPUT, code + WEIGHT)
    orders, lengths = order_arrays(rows, 3 * stages * count)
    candidate = Candidate(placement, cuts, np.zeros(stages, dtype=np.bool_), orders, lengths)
    return Walk(setting, PACKED, -(-stages // setting.devices), candidate, annealed=True)


@njit()
def _assign(sums: Any, largest: Any, kinds: Any, limits: Any, spread: bool, most: int, device_of: Any) -> bool:
    """Assign operators to devices, depth first; whether all are assigned.

    Args:
        sums, largest: see ``GraphArrays``.
        kinds, limits: see ``MachineArrays``.
        spread: start with the device that has the least part of its work; otherwise with the previous operator's while
            that has less than its part.
        most: assignments to try.
        device_of: device of each operator, filled.
    """
    nodes, devices = device_of.shape[0], limits.shape[0]
    totals = np.zeros((4, nodes + 1, devices))  # after each number of operators
    state, saved, peak, work = totals[0], totals[1], totals[2], totals[3]
    tried = np.zeros((nodes, devices), dtype=np.bool_)
    i, visited = 0, 0
    while 0 <= i < nodes and visited < most:
        visited += 1
        d = _next_device(i, tried[i], work[i], spread, device_of)
        if d < 0:
            tried[i] = False
            device_of[i] = -1
            i -= 1
            continue
        tried[i, d], device_of[i] = True, d
        totals[:, i + 1] = totals[:, i]
        own = sums[kinds[d], :, i + 1] - sums[kinds[d], :, i]
        state[i + 1, d] += own[STATE]
        saved[i + 1, d] += own[SAVED]
        peak[i + 1, d] = max(peak[i, d], saved[i + 1, d] + largest[kinds[d], 0, i])
        work[i + 1, d] += own[: WEIGHT + 1].sum() / max(sums[kinds[d], : WEIGHT + 1, nodes].sum(), 1e-300)
        left = (limits - state[i + 1] - saved[i + 1]).sum()
        needed = (sums[:, STATE, nodes] - sums[:, STATE, i + 1] + sums[:, SAVED, nodes] - sums[:, SAVED, i + 1]).min()
        if state[i + 1, d] + peak[i + 1, d] <= limits[d] and needed <= left:
            i += 1
    return bool(i == nodes)


@njit()
def _next_device(i: int, tried: Any, work: Any, spread: bool, device_of: Any) -> int:
    """The device to try next for operator ``i``; -1 if all are tried."""
    devices, before = tried.shape[0], device_of[i - 1] if i > 0 else 0
    if not spread and not tried[before] and work[before] < FULL / devices:
        return int(before)
    best = -1
    for d in range(devices):
        if not tried[d] and (best < 0 or work[d] < work[best]):
            best = d
    return best
