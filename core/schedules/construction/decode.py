"""From priorities to a compute order: list scheduling under a memory limit, compiled.

Every action has a key. A free device runs the available action with the smallest key, or waits for one with a smaller
key that is about to become available. Stages run microbatches in order. So every assignment of keys is a legal order,
and a search over orders becomes a search over numbers (random keys: Bean 1994).

A forward starts only if every microbatch on its device can still be finished, oldest first (the banker's algorithm,
Dijkstra 1965): Σ held by a microbatch and younger ones, plus its remaining allocations, is within the limit. Hence no
order deadlocks, and every limit that fits one microbatch on all of a device's stages has an order.
"""

from typing import Any, NamedTuple

import numpy as np

from ...evaluate.coding import BOTH, FORWARD, INFINITY, INPUT, KINDS, WEIGHT, Floats, Integers
from ...numba_cache import njit

DECODING = 40
"""Cost of one ``decode``, in evaluations of an order."""
TAIL = 1e-3
"""Weight of the devices' mean end, added to the makespan in a search: it ranks orders of equal makespan."""


class SchedulerInput(NamedTuple):
    """What the list scheduler takes in addition to the priorities; one entry per stage unless stated otherwise.

    Args:
        microbatches: their number.
        placement: device of every stage.
        stages_on: stages of every device, (devices, chunks).
        times: of F, I and W, (3, stages); where a stage is fused its I takes the time of B.
        hops: delay of a message from the previous stage.
        need, kept: bytes that F has to reserve, and bytes held after I; more may be held after I than after F.
        limits: bytes that each device may hold, (devices).
        fused: whether a stage runs I and W as B.
    """

    microbatches: int
    placement: Integers
    stages_on: Integers
    times: Floats
    hops: Floats
    need: Floats
    kept: Floats
    limits: Floats
    fused: "np.ndarray"


class Priorities(NamedTuple):
    """Which of several available actions runs, and when a device waits instead.

    Args:
        keys: of every action, (3, stages, count); the smallest goes first.
        patience: how long a device may wait for a better action before it runs F, I or W, as a share of that action's
            time, (3).
        caps: most microbatches that a stage holds at once, (stages); at least 1.
    """

    keys: Floats
    patience: Floats
    caps: Integers


class _State(NamedTuple):
    """What has run so far, and what each device runs next.

    Args:
        begun, turned, ended: number of F, of I (or B) and of W (or B) that each stage has run.
        forward_end, backward_end: ends of F and of I (or B), (stages, count); infinite until they run.
        free, held: when each device is free, and its bytes.
        start, kind, stage: the next action of each device; its start is infinite if it has none.
        stale: whether the next action of a device must be chosen again.
        ready: of the device that chooses, the earliest start of its next action by kind and place, (3, chunks).
    """

    begun: Integers
    turned: Integers
    ended: Integers
    forward_end: Floats
    backward_end: Floats
    free: Floats
    held: Floats
    start: Floats
    kind: Integers
    stage: Integers
    stale: "np.ndarray"
    ready: Floats


@njit(inline="always")
def _may_begin(d: int, place: int, given: Any, state: Any) -> bool:
    """Whether device ``d`` may begin the next forward of its stage at ``place``."""
    need, stages_on, held, limit = given.need, given.stages_on, state.held[d], given.limits[d]
    begun, turned, ended = state.begun, state.turned, state.ended
    if held + need[stages_on[d, place]] > limit:
        return False
    count = stages_on.shape[1]
    total = 0.0
    first, last = ended[stages_on[d, 0]], begun[stages_on[d, place]] + 1
    for c in range(count):
        stage = stages_on[d, c]
        total += need[stage]
        first, last = min(first, ended[stage]), max(last, begun[stage])
    if held + total <= limit:
        return True
    suffix = 0.0
    for microbatch in range(last - 1, first - 1, -1):
        missing = 0.0
        for c in range(count):
            stage = stages_on[d, c]
            through = begun[stage] + (1 if c == place else 0)
            if microbatch >= through:
                missing += need[stage]
            elif microbatch >= ended[stage]:
                suffix += given.kept[stage] if microbatch < turned[stage] else need[stage]
        if suffix + missing > limit:
            return False
    return True


@njit(inline="always")
def _find_ready(d: int, given: Any, caps: Any, state: Any) -> float:
    """Fill ``ready`` with the earliest start of the next action of each kind and stage of device ``d``.

    Returns:
        The earliest of all.
    """
    ready, hops = state.ready, given.hops
    last = state.begun.shape[0] - 1
    earliest = INFINITY
    for c in range(given.stages_on.shape[1]):
        stage = given.stages_on[d, c]
        ready[FORWARD, c] = ready[INPUT, c] = ready[WEIGHT, c] = INFINITY
        m, turn, end = state.begun[stage], state.turned[stage], state.ended[stage]
        if m < given.microbatches and m - end < caps[stage]:
            at = 0.0 if stage == 0 else state.forward_end[stage - 1, m] + hops[stage]
            if at < INFINITY and _may_begin(d, c, given, state):
                ready[FORWARD, c] = at
                earliest = min(earliest, at)
        if turn < m:
            at = state.forward_end[stage, turn]
            if stage < last:
                at = max(at, state.backward_end[stage + 1, turn] + hops[stage + 1])
            ready[INPUT, c] = at
            earliest = min(earliest, at)
        if end < turn and not given.fused[stage]:
            at = state.backward_end[stage, end]
            ready[WEIGHT, c] = at
            earliest = min(earliest, at)
    return earliest


@njit(inline="always")
def _pick(d: int, now: float, given: Any, priorities: Any, state: Any) -> tuple[float, int, int]:
    """Start, kind and stage of the action that device ``d`` runs at ``now``, or waits for within its patience."""
    ready, keys, stages_on = state.ready, priorities.keys, given.stages_on
    best, kind, place, start = INFINITY, -1, 0, now
    until = now
    for late in range(2):
        if late:
            until = now + priorities.patience[kind] * given.times[kind, stages_on[d, place]]
            if until <= now:
                break
        for c in range(stages_on.shape[1]):
            stage = stages_on[d, c]
            for k in range(3):
                at = ready[k, c]
                if (now < at < until) if late else (at <= now):
                    m = (
                        state.begun[stage]
                        if k == FORWARD
                        else state.turned[stage]
                        if k == INPUT
                        else state.ended[stage]
                    )
                    if kind < 0 or keys[k, stage, m] < best:
                        best, kind, place, start = keys[k, stage, m], k, c, max(now, at)
    return start, kind, stages_on[d, place]


@njit(inline="always")
def _next_device(given: Any, priorities: Any, state: Any) -> int:
    """The device that acts next, after an update of those for which something has changed; -1 if none can act."""
    start = state.start
    soonest, chosen = INFINITY, -1
    for d in range(given.stages_on.shape[0]):
        if state.stale[d]:
            at = _find_ready(d, given, priorities.caps, state)
            start[d] = INFINITY
            if at < INFINITY:
                start[d], state.kind[d], state.stage[d] = _pick(d, max(at, state.free[d]), given, priorities, state)
            state.stale[d] = False
        if start[d] < soonest:
            soonest, chosen = start[d], d
    return chosen


@njit(inline="always")
def _work(given: Any) -> Any:
    """Compute time of each device."""
    times, fused = given.times, given.fused
    work = np.zeros(given.stages_on.shape[0])
    for s in range(given.placement.shape[0]):
        one = times[FORWARD, s] + times[INPUT, s] + (0.0 if fused[s] else times[WEIGHT, s])
        work[given.placement[s]] += given.microbatches * one
    return work


@njit()
def decode(given: Any, priorities: Any, orders: Any, lengths: Any, stop: float = INFINITY) -> tuple[float, float]:
    """The order that priorities define.

    Args:
        given: :class:`SchedulerInput`.
        priorities: :class:`Priorities`.
        orders: filled with codes (see `coding`), (devices, 3 · chunks · count).
        lengths: filled with how many actions each device has, (devices,).
        stop: give up once makespan + ``TAIL`` · mean end is certain to exceed this.

    Returns:
        Makespan, and the mean over devices of the end of their last actions. Infinite where the order was given up.
    """
    count, placement, times, fused = given.microbatches, given.placement, given.times, given.fused
    stages, devices = placement.shape[0], given.stages_on.shape[0]
    state = _State(
        np.zeros(stages, dtype=np.int64), np.zeros(stages, dtype=np.int64), np.zeros(stages, dtype=np.int64),
        np.full((stages, count), INFINITY), np.full((stages, count), INFINITY),
        np.zeros(devices), np.zeros(devices),
        np.zeros(devices), np.zeros(devices, dtype=np.int64), np.zeros(devices, dtype=np.int64),
        np.ones(devices, dtype=np.bool_), np.empty((3, given.stages_on.shape[1])),
    )  # fmt: skip
    free, held, start, stale = state.free, state.held, state.start, state.stale
    ends = _work(given)  # of each device, if it did not idle any more
    tail = TAIL * ends.mean()
    lengths[:] = 0
    while True:
        d = _next_device(given, priorities, state)
        if d < 0:
            break
        k, s = state.kind[d], state.stage[d]
        ends[d] += start[d] - free[d]
        if ends[d] + tail > stop:
            return INFINITY, INFINITY
        end = start[d] + times[k, s]
        if k == FORWARD:
            m = state.begun[s]
            state.begun[s] += 1
            state.forward_end[s, m] = end
            held[d] += given.need[s]
            if s + 1 < stages:
                stale[placement[s + 1]] = True
        elif k == INPUT:
            m = state.turned[s]
            state.turned[s] += 1
            state.backward_end[s, m] = end
            held[d] += (0.0 if fused[s] else given.kept[s]) - given.need[s]
            if fused[s]:
                state.ended[s] += 1
            if s > 0:
                stale[placement[s - 1]] = True
        else:
            m = state.ended[s]
            state.ended[s] += 1
            held[d] -= given.kept[s]
        orders[d, lengths[d]] = KINDS * (s * count + m) + (BOTH if k == INPUT and fused[s] else k)
        lengths[d] += 1
        free[d] = end
        stale[d] = True
    return free.max(), free.mean()
