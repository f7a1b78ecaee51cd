"""Every placement of a small graph's operators on devices: starts that single moves of operators rarely reach.

A good order for one placement is often a poor one for its neighbours, so annealing rejects the move to a neighbour
before the order is adapted. Where the placements can be enumerated, each that may be faster than the best walk becomes
a start with a list-scheduled order, and is annealed by itself.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...evaluate.coding import BOTH, FORWARD, INPUT, KINDS, WEIGHT, Floats, Integers
from ...evaluate.compiled import END, START, make_stage_arrays
from ...numba_cache import njit
from ...schedules.meaning import PLACED
from ..problem.arrays import SAVED, STATE
from ..problem.candidate import Candidate
from ..problem.setting import Setting
from .walk import Walk

ENUMERATED = 20_000
"""Largest number of assignments of operators to devices that are enumerated."""
STARTS = 300
"""Largest number of placements that become starts: those with the smallest estimates of the step."""


def few_placements(setting: Setting) -> bool:
    """Whether the placements of the setting's operators can be enumerated."""
    return bool(setting.devices ** len(setting.graph.nodes) <= ENUMERATED)


def on_every_placement(walk: Walk) -> Iterator[Walk]:
    """Walks on other placements with list-scheduled orders; none of them is evaluated.

    Args:
        walk: with one stage for each operator, evaluated.
    """
    setting, like = walk.setting, walk.best
    stages = len(like.placement)
    costs = make_stage_arrays(stages, setting.edges(stages))
    for placement in _promising(setting, walk.step_s if walk.excess == 0 else np.inf):
        orders, lengths = np.zeros_like(like.orders), np.zeros_like(like.lengths)
        candidate = Candidate(placement.copy(), like.cuts.copy(), like.recompute.copy(), orders, lengths)
        setting.fill(candidate, costs)
        limits = np.array(setting.limits)
        if _list_schedule(setting.microbatches, candidate.placement, costs, limits, orders, lengths):
            yield Walk(setting, PLACED, walk.chunks, candidate, annealed=True, recomputes=walk.recomputes)


@njit()
def _rest(stages: int, costs: Any) -> Any:
    """Time from the start of F, I and W of every stage to the end of all that follows, (3, stages)."""
    times = costs.times
    rest = np.zeros((3, stages))
    rest[WEIGHT] = times[WEIGHT]
    rest[INPUT] = times[WEIGHT]
    for s in range(stages):  # gradients are sent to lower stages
        rest[INPUT, s] += times[INPUT, s]
        for t in range(s):
            for e in range(costs.back_first[t], costs.back_first[t + 1]):
                if costs.back_from[e] == s:
                    after = times[INPUT, s] + costs.back_delay[e] + rest[INPUT, t]
                    rest[INPUT, s] = max(rest[INPUT, s], after)
    rest[FORWARD] = times[FORWARD] + rest[INPUT]
    for s in range(stages - 1, -1, -1):
        for t in range(s + 1, stages):
            for e in range(costs.forward_first[t], costs.forward_first[t + 1]):
                if costs.forward_from[e] == s:
                    after = times[FORWARD, s] + costs.forward_delay[e] + rest[FORWARD, t]
                    rest[FORWARD, s] = max(rest[FORWARD, s], after)
    return rest


@njit()
def _list_schedule(count: int, placement: Any, costs: Any, limits: Any, orders: Any, lengths: Any) -> bool:
    """Fill ``orders``: devices run what can start first; of those, what the longest path follows. False if memory
    ends that before all actions have run."""
    stages, devices = placement.shape[0], lengths.shape[0]
    rest, free, room, work = _rest(stages, costs), np.zeros(devices), limits.copy(), np.zeros(devices)
    finish, following = np.zeros((3, stages, count)), np.zeros((3, stages), dtype=np.int64)
    for s in range(stages):
        room[placement[s]] -= costs.state[s]
        work[placement[s]] += costs.times[FORWARD, s] + costs.times[INPUT, s] + costs.times[WEIGHT, s]
    pace = work.max()
    for _ in range(3 * stages * count):
        chosen, least, urgency = -1, np.inf, 0.0
        for kind in range(3):
            for s in range(stages):
                m, d = following[kind, s], placement[s]
                if m == count or room[d] < costs.saved[START, kind, s] + costs.workspace[s]:
                    continue
                if kind != FORWARD and following[kind - 1, s] <= m:
                    continue
                ready = free[d] if kind == FORWARD else max(free[d], finish[kind - 1, s, m])
                known = True
                if kind == FORWARD:
                    for e in range(costs.forward_first[s], costs.forward_first[s + 1]):
                        known &= following[FORWARD, costs.forward_from[e]] > m
                        ready = max(ready, finish[FORWARD, costs.forward_from[e], m] + costs.forward_delay[e])
                elif kind == INPUT:
                    for e in range(costs.back_first[s], costs.back_first[s + 1]):
                        known &= following[INPUT, costs.back_from[e]] > m
                        ready = max(ready, finish[INPUT, costs.back_from[e], m] + costs.back_delay[e])
                now = rest[kind, s] - m * pace
                if known and (ready < least or (ready == least and now > urgency)):
                    chosen, least, urgency = KINDS * s + kind, ready, now
        if chosen < 0:
            return False
        s, kind = chosen // KINDS, chosen % KINDS
        m, d = following[kind, s], placement[s]
        following[kind, s] += 1
        free[d] = least + costs.times[kind, s]
        finish[kind, s, m] = free[d]
        room[d] -= costs.saved[START, kind, s] + costs.saved[END, kind, s]
        orders[d, lengths[d]] = KINDS * (s * count + m) + kind
        lengths[d] += 1
    return True


def _promising(setting: Setting, step_s: float) -> Iterator[Integers]:
    """Placements that one microbatch fits on and whose estimated step is below ``step_s``, smallest first."""
    nodes, devices = len(setting.graph.nodes), setting.devices
    placements = np.indices((devices,) * nodes).reshape(nodes, -1).T
    if _alike(setting):
        placements = placements[_canonical(placements)]
    used = np.stack([(placements == device).any(axis=1) for device in range(devices)])
    placements = placements[used.all(axis=0)]
    sums = np.diff(setting.arrays.sums, axis=2)
    before = np.concatenate([[0.0], np.cumsum(sums[setting.slowest[0], 0])])
    estimate, fits = np.zeros(len(placements)), np.ones(len(placements), dtype=np.bool_)
    for device in range(devices):
        on, own = placements == device, sums[setting.slowest[device]]
        load = on @ own[:BOTH].sum(axis=0)
        head = before[on.argmax(axis=1)]
        estimate = np.maximum(estimate, setting.microbatches * load + head)
        fits &= on @ (own[STATE] + own[SAVED]) <= setting.limits[device]
    order = np.argsort(estimate, kind="stable")
    yield from placements[order[(fits & (estimate < step_s))[order]]][:STARTS]


def _alike(setting: Setting) -> bool:
    """Whether the devices can be exchanged for each other."""
    machine, off = setting.machine, ~np.eye(setting.devices, dtype=np.bool_)
    over_replicas = (*machine.reduce, *machine.scatter, *machine.gather)
    tables: tuple[Floats, ...] = (machine.latency[off], machine.rate[off], machine.limits, *over_replicas)
    return len(set(setting.slowest)) == 1 and all(len(np.unique(table)) <= 1 for table in tables)


def _canonical(placements: Integers) -> "np.ndarray":
    """Which placements use the devices in ascending order."""
    highest = np.maximum.accumulate(placements, axis=1)
    first = placements[:, 0] == 0
    return np.asarray(first & (np.diff(highest, axis=1) <= 1).all(axis=1))
