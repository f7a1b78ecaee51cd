"""Greedy list scheduling: the heuristic of ZB-1p and ZB-2p, compiled.

A free device runs an available I; else W if the next F would not fit in memory; else F; and W where it would idle. Two
parameters relax these rules, both shares of an action's time (Zero Bubble, arXiv 2401.10241, section 3.1, has switches
for the same):

- ``overrun``: in the warm-up an F may end that much after the first I could have begun;
- ``squeeze``: W may run over the end of a gap by that much.

Devices decide in the order of time, and at equal times in the order of their numbers. A heap holds the times at which a
device becomes free or an input of it arrives.
"""

from heapq import heappop, heappush
from typing import Any

import numpy as np

from ...actions import Kind
from ...numba_cache import njit
from ...plan.memory import reserving_bytes
from ...timing.coding import FORWARD, INFINITY, INPUT, KINDS, WEIGHT, decode_orders
from ...timing.compiled import run
from ..problem import Schedule, ScheduleProblem
from ..scored import ROUNDING, costs_of
from .instance import instance


class Greedy:
    """The orders of one problem, with one stage per device.

    Args:
        problem: the problem.
        limits: memory limit of every device; each fits at least one microbatch.
    """

    def __init__(self, problem: ScheduleProblem, limits: list[float]) -> None:
        self._problem, costs = problem, costs_of(problem)
        held = [reserving_bytes(cost) for cost in costs]
        self._times = np.array(
            [[c.forward_s, c.backward_input_s, c.backward_weight_s] for c in costs], dtype=np.float64
        ).T.copy()
        self._changes = np.array([[h[Kind.F], h[Kind.I], h[Kind.W]] for h in held], dtype=np.float64).T.copy()
        self._limits = np.array(limits, dtype=np.float64)
        self._orders = np.zeros((len(costs), 3 * problem.microbatches), dtype=np.int64)
        self._ends = np.zeros((3, len(costs), problem.microbatches))
        task = instance(problem, range(len(costs)))
        self._lengths = np.full(len(costs), 3 * problem.microbatches, dtype=np.int64)
        self._task, self._scratch = task.for_orders()[:3], task.scratch()

    def build(self, overrun: float, squeeze: float) -> tuple[float, float]:
        """Build the order of these parameters, and return its longest stage span and its makespan."""
        _order(
            self._problem.hop_s, self._times, self._changes, self._limits, overrun, squeeze, self._orders, self._ends
        )
        if run(self._orders, self._lengths, *self._task, np.zeros(len(self._orders)), INFINITY, self._scratch) < 0:
            return INFINITY, INFINITY
        # Starts of the first F.
        first = np.append(0.0, self._scratch.finish[self._orders[:-1, 0]] + self._problem.hop_s)
        return float((self._scratch.free - first).max()), float(self._scratch.free.max())

    def schedule(self, name: str, placement: tuple[int, ...]) -> Schedule:
        """The schedule of the last run."""
        stages, count = len(self._orders), self._problem.microbatches
        return Schedule(name, placement, count, decode_orders(self._orders, self._lengths, stages, count))


@njit()
def _arrival(ends: Any, counts: Any, hop_s: float, device: int, kind: int) -> float:
    """When the input of the next F or I of a device arrives; infinite if not known."""
    microbatch = counts[kind, device]
    if microbatch == ends.shape[2] or (kind == INPUT and microbatch >= counts[FORWARD, device]):
        return INFINITY
    source = device - 1 if kind == FORWARD else device + 1
    if source < 0 or source == ends.shape[1]:
        return 0.0
    return ends[kind, source, microbatch] + hop_s if microbatch < counts[kind, source] else INFINITY


@njit()
def _choose(now: float, forward: float, backward: float, counts: Any, gap_s: float, full: bool) -> int:
    """The kind that a free device runs; −1 if it waits for the next input, or has nothing left to do.

    Args:
        now: the time.
        forward, backward: when its next F and I could begin; infinite if that is not known or not allowed.
        counts: its F, I and W so far.
        gap_s: idle time that is long enough for a W.
        full: whether its next F does not fit in memory.
    """
    pending = counts[WEIGHT] < counts[INPUT]
    if backward <= now + ROUNDING:
        return INPUT
    if pending and full:
        return WEIGHT
    if forward <= now + ROUNDING:
        return FORWARD
    return WEIGHT if pending and min(forward, backward) - now >= gap_s - ROUNDING else -1


@njit()
def _order(
    hop_s: float,
    times: Any,
    changes: Any,
    limits: Any,
    overrun: float,
    squeeze: float,
    orders: Any,
    ends: Any,
) -> None:
    """Fill ``orders`` with the coded actions of every device; the n-th F, I and W are those of microbatch n."""
    devices, count = ends.shape[1], ends.shape[2]
    counts = np.zeros((3, devices), dtype=np.int64)
    held, free, first_input = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    at = 0.0
    for device in range(devices):
        at += times[FORWARD, device] + hop_s
    at -= hop_s
    for device in range(devices - 1, -1, -1):
        first_input[device] = at
        at += times[INPUT, device] + hop_s
    events = [(0.0, device) for device in range(devices)]
    while events:
        now, device = heappop(events)
        if now < free[device]:
            continue
        full = held[device] + changes[FORWARD, device] > limits[device] * (1 + ROUNDING)
        backward = _arrival(ends, counts, hop_s, device, INPUT)
        forward = INFINITY if full else _arrival(ends, counts, hop_s, device, FORWARD)
        late_s = first_input[device] + overrun * times[FORWARD, device] + ROUNDING
        if (
            counts[FORWARD, device]
            and not counts[INPUT, device]
            and max(forward, now) + times[FORWARD, device] > late_s
        ):
            forward = INFINITY
        full = full and counts[FORWARD, device] < count
        kind = _choose(now, forward, backward, counts[:, device], times[WEIGHT, device] * (1 - squeeze), full)
        if kind == -1 and min(forward, backward) < INFINITY:
            heappush(events, (min(forward, backward), device))
        if kind == -1:
            continue
        microbatch = counts[kind, device]
        end = now + times[kind, device]
        orders[device, counts[:, device].sum()] = KINDS * (device * count + microbatch) + kind
        held[device] += changes[kind, device]
        free[device] = ends[kind, device, microbatch] = end
        counts[kind, device] += 1
        heappush(events, (end, device))
        reader = device + 1 if kind == FORWARD else device - 1
        if kind != WEIGHT and 0 <= reader < devices:
            heappush(events, (end + hop_s, reader))
