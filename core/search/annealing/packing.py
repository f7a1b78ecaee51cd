"""Devices for operators such that one microbatch at a time fits in every memory, if a short search finds such devices.

An order that ends each microbatch before the next one holds the least. A device then needs the state of its operators,
and at most the saved tensors up to one of them plus the workspace of that one. So operators are assigned one after
another, in depth-first order, and an assignment ends where a device needs more than it may hold.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...evaluate.coding import FORWARD, INPUT, KINDS, WEIGHT, Integers, order_arrays
from ...numba_cache import njit
from ...schedules.meaning import PACKED
from ..problem.arrays import SAVED, STATE
from ..problem.candidate import Candidate
from ..problem.setting import Setting
from .walk import Walk

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
        d = _next_device(i, tried[i], work[i], sums, kinds, spread, device_of)
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
def _next_device(i: int, tried: Any, work: Any, sums: Any, kinds: Any, spread: bool, device_of: Any) -> int:
    """The device to try next for operator ``i``; -1 if all are tried."""
    devices, before = tried.shape[0], device_of[i - 1] if i > 0 else 0
    if not spread and not tried[before] and work[before] < FULL / devices:
        return int(before)
    best = -1
    for d in range(devices):
        if not tried[d] and (best < 0 or work[d] < work[best]):
            best = d
    return best
