"""From priorities to a compute order: list scheduling under a memory limit, compiled.

Every action has a key. A free device runs the available action with the smallest key, or waits for one with a smaller
key that is about to become available. Stages run microbatches in order. So every assignment of keys is a legal order,
and a search over orders becomes a search over numbers (random keys: Bean 1994).

A forward starts only if every microbatch on its device can still be finished, oldest first (the banker's algorithm,
Dijkstra 1965): Σ held by a microbatch and younger ones, plus its remaining allocations, is within the limit. Hence no
order deadlocks, and every limit that fits one microbatch on all of a device's stages has an order. What a device holds
is summed here, and not over an order (`memory.held_bytes`), because it decides which action comes next.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen

from ...actions import Kind
from ...numba_cache import njit
from ...plan.memory import saved_bytes
from ...timing.coding import BOTH, FORWARD, INFINITY, INPUT, KINDS, WEIGHT, Floats, Integers, decode_orders
from ...timing.compiled import Scratch, StageArrays, fill_saved, make_scratch, make_stage_arrays, peak, run
from ..problem import Schedule, ScheduleProblem
from ..scored import ROUNDING, costs_of

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
    """

    microbatches: int
    placement: Integers
    stages_on: Integers
    times: Floats
    hops: Floats
    need: Floats
    kept: Floats
    limits: Floats


class Priorities(NamedTuple):
    """Which of several available actions runs, and when a device waits instead.

    Args:
        keys: of every action, (3, stages, count); the smallest goes first.
        patience: how long a device may wait for a better action before it runs F, I or W, as a share of that action's
            time, (3) or (3, devices).
        caps: most microbatches that a stage holds at once, (stages); at least 1.
        fused: whether a stage runs I and W as B, (stages).
        greedy: whether a device waits before F only until its first I, and before W only if its next F fits in memory.
        strict: whether a device runs F and I in the order of their keys, and waits for the next one; W goes between
            them. The limits have to fit that order with each W directly after its I.
    """

    keys: Floats
    patience: Floats
    caps: Integers
    fused: "np.ndarray"
    greedy: bool = False
    strict: bool = False


@njit()
def decode(  # noqa: PLR0912, PLR0915 - its parts are inner functions, which share its arrays
    given: Any, priorities: Any, orders: Any, lengths: Any, stop: float = INFINITY
) -> tuple[float, float]:
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
    # Arrays are variables: numba counts a reference at each access to an array of a tuple, which takes 1.8 × as long.
    count, placement, stages_on = given.microbatches, given.placement, given.stages_on
    times, hops, need, kept = given.times, given.hops, given.need, given.kept
    limits, fused, greedy, strict = given.limits, priorities.fused, priorities.greedy, priorities.strict
    keys, patience, caps = priorities.keys, priorities.patience, priorities.caps
    stages, devices, chunks = placement.shape[0], stages_on.shape[0], stages_on.shape[1]
    # Number of F, of I (or B) and of W (or B) that each stage has run.
    begun = np.zeros(stages, dtype=np.int64)
    turned = np.zeros(stages, dtype=np.int64)
    ended = np.zeros(stages, dtype=np.int64)
    forward_end = np.full((stages, count), INFINITY)
    backward_end = np.full((stages, count), INFINITY)
    free, held = np.zeros(devices), np.zeros(devices)
    start, kind, stage = np.zeros(devices), np.zeros(devices, dtype=np.int64), np.zeros(devices, dtype=np.int64)
    stale = np.ones(devices, dtype=np.bool_)
    ends = np.zeros(devices)  # of each device, if it did not idle any more
    for s in range(stages):
        ends[placement[s]] += count * (times[FORWARD, s] + times[INPUT, s] + (0.0 if fused[s] else times[WEIGHT, s]))
    tail = TAIL * ends.mean()
    ready = np.empty((3, chunks))
    lengths[:] = 0

    def may_begin(d: int, place: int) -> bool:
        """Whether device ``d`` may begin the next forward of its stage at ``place``."""
        limit = limits[d]
        if held[d] + need[stages_on[d, place]] > limit:
            return False
        if strict:
            return True
        total = 0.0
        first, last = ended[stages_on[d, 0]], begun[stages_on[d, place]] + 1
        for c in range(chunks):
            own = stages_on[d, c]
            total += need[own]
            first, last = min(first, ended[own]), max(last, begun[own])
        if held[d] + total <= limit:
            return True
        suffix = 0.0
        for microbatch in range(last - 1, first - 1, -1):
            missing = 0.0
            for c in range(chunks):
                own = stages_on[d, c]
                if microbatch >= begun[own] + (1 if c == place else 0):
                    missing += need[own]
                elif microbatch >= ended[own]:
                    suffix += kept[own] if microbatch < turned[own] else need[own]
            if suffix + missing > limit:
                return False
        return True

    def keep_next(d: int) -> float:
        """Keep W and the F or I with the smallest key in ``ready``; the earliest start of them."""
        least, chosen, place, earliest = INFINITY, FORWARD, 0, INFINITY
        for c in range(chunks):
            own = stages_on[d, c]
            if begun[own] < count and keys[FORWARD, own, begun[own]] < least:
                least, chosen, place = keys[FORWARD, own, begun[own]], FORWARD, c
            if turned[own] < count and keys[INPUT, own, turned[own]] < least:
                least, chosen, place = keys[INPUT, own, turned[own]], INPUT, c
        for c in range(chunks):
            for k in range(2):
                if k != chosen or c != place:
                    ready[k, c] = INFINITY
            earliest = min(earliest, ready[FORWARD, c], ready[INPUT, c], ready[WEIGHT, c])
        return earliest

    def find_ready(d: int) -> float:
        """Fill ``ready`` with the earliest start of the next action of each kind and stage of device ``d``; the
        earliest of all."""
        earliest = INFINITY
        for c in range(chunks):
            own = stages_on[d, c]
            ready[FORWARD, c] = ready[INPUT, c] = ready[WEIGHT, c] = INFINITY
            m, turn, end = begun[own], turned[own], ended[own]
            if m < count and m - end < caps[own]:
                at = 0.0 if own == 0 else forward_end[own - 1, m] + hops[own]
                if at < INFINITY and may_begin(d, c):
                    ready[FORWARD, c] = at
                    earliest = min(earliest, at)
            if turn < m:
                at = forward_end[own, turn]
                if own < stages - 1:
                    at = max(at, backward_end[own + 1, turn] + hops[own + 1])
                ready[INPUT, c] = at
                earliest = min(earliest, at)
            if end < turn and not fused[own]:
                at = backward_end[own, end]
                ready[WEIGHT, c] = at
                earliest = min(earliest, at)
        return keep_next(d) if strict else earliest

    def hurries(d: int, chosen: int) -> bool:
        """Whether device ``d`` does not wait before an action of this kind, if it is greedy."""
        own = stages_on[d]
        if chosen == WEIGHT:
            return bool(begun[own].min() < count and held[d] + need[own].max() > limits[d])
        return bool(chosen == FORWARD and turned[own].max() > 0)

    def pick(d: int, now: float) -> tuple[float, int, int]:
        """Start, kind and stage of the action that device ``d`` runs at ``now``, or waits for within its patience."""
        best, chosen, place, begins = INFINITY, -1, 0, now
        until = now
        for late in range(2):
            if late:
                until = now + patience[chosen, d] * times[chosen, stages_on[d, place]]
                if until <= now or (greedy and hurries(d, chosen)):
                    break
            for c in range(chunks):
                own = stages_on[d, c]
                for k in range(3):
                    at = ready[k, c]
                    if (now < at < until) if late else (at <= now):
                        m = begun[own] if k == FORWARD else turned[own] if k == INPUT else ended[own]
                        if chosen < 0 or keys[k, own, m] < best:
                            best, chosen, place, begins = keys[k, own, m], k, c, max(now, at)
        return begins, chosen, stages_on[d, place]

    while True:
        soonest, acting = INFINITY, -1
        for each in range(devices):  # only those for which something has changed choose again
            if stale[each]:
                at = find_ready(each)
                start[each] = INFINITY
                if at < INFINITY:
                    start[each], kind[each], stage[each] = pick(each, max(at, free[each]))
                stale[each] = False
            if start[each] < soonest:
                soonest, acting = start[each], each
        if acting < 0:
            break
        d = acting
        k, s = kind[d], stage[d]
        ends[d] += start[d] - free[d]
        if ends[d] + tail > stop:
            return INFINITY, INFINITY
        end = start[d] + times[k, s]
        if k == FORWARD:
            m = begun[s]
            begun[s] += 1
            forward_end[s, m] = end
            held[d] += need[s]
            if s + 1 < stages:
                stale[placement[s + 1]] = True
        elif k == INPUT:
            m = turned[s]
            turned[s] += 1
            backward_end[s, m] = end
            held[d] += (0.0 if fused[s] else kept[s]) - need[s]
            if fused[s]:
                ended[s] += 1
            if s > 0:
                stale[placement[s - 1]] = True
        else:
            m = ended[s]
            ended[s] += 1
            held[d] -= kept[s]
        orders[d, lengths[d]] = KINDS * (s * count + m) + (BOTH if k == INPUT and fused[s] else k)
        lengths[d] += 1
        free[d] = end
        stale[d] = True
    if ended.min() < count:  # a strict order that does not fit
        return INFINITY, INFINITY
    return free.max(), free.mean()


class Listed(NamedTuple):
    """A list-scheduled order.

    Args:
        value: makespan, and the mean end of the devices; infinite where the order was given up.
        orders, lengths: its codes.
    """

    value: tuple[float, float]
    orders: Integers
    lengths: Integers


@frozen(eq=False)
class Instance:
    """A problem with a placement, as arrays with an entry for each stage unless stated otherwise.

    Args:
        problem: the problem.
        placement: device of every stage.
        stages_on: (devices, chunks).
        times: of F, I and W, (3, stages).
        backward: time of the full backward.
        hops: delay of a message from the previous stage.
        saved, kept: bytes held after F, and after I.
        limits: per device; infinite without one.
    """

    problem: ScheduleProblem
    placement: Integers
    stages_on: Integers
    times: Floats
    backward: Floats
    hops: Floats
    saved: Floats
    kept: Floats
    limits: Floats

    @property
    def need(self) -> Floats:
        """Bytes that F has to reserve until I ends: after I a microbatch may hold more than after F."""
        return np.maximum(self.saved, self.kept)

    @property
    def least_memory(self) -> float:
        """The smallest limit that any order can keep: one microbatch on all stages of a device, its backwards fused."""
        return float(self.saved[self.stages_on].sum(axis=1).max())

    @property
    def too_large_to_split(self) -> "np.ndarray":
        """Stages of devices whose limit does not fit one microbatch between I and W of all their stages."""
        short = self.need[self.stages_on].sum(axis=1) > self.limits
        return np.asarray(short[self.placement], dtype=np.bool_)

    def fused_need(self, fused: "np.ndarray") -> Floats:
        """Bytes that F reserves; a fused stage needs no more than it saves."""
        return np.where(fused, self.saved, self.need)

    def listed(self, priorities: Priorities, stop: float = INFINITY) -> "Listed":
        """The order that priorities define; given up once it is certain to exceed ``stop`` (see ``decode``)."""
        fused, times = priorities.fused, self.times.copy()
        times[INPUT] = np.where(fused, self.backward, times[INPUT])
        times[WEIGHT] = np.where(fused, 0.0, times[WEIGHT])
        kept, count, devices = np.where(fused, self.saved, self.kept), self.problem.microbatches, len(self.stages_on)
        given = SchedulerInput(
            count, self.placement, self.stages_on, times, self.hops, self.fused_need(fused), kept, self.limits
        )
        orders = np.zeros((devices, 3 * self.stages_on.shape[1] * count), dtype=np.int64)
        lengths = np.zeros(devices, dtype=np.int64)
        patience = np.array(np.broadcast_to(np.reshape(priorities.patience, (3, -1)), (3, devices)))
        return Listed(decode(given, priorities._replace(patience=patience), orders, lengths, stop), orders, lengths)

    def for_orders(self) -> tuple[int, Integers, StageArrays, Floats]:
        """Count, placement, costs and limits, for compiled searches."""
        stages = len(self.placement)
        costs = make_stage_arrays(stages, stages - 1)
        costs.times[:] = *self.times, self.backward
        before, after = np.arange(stages - 1), np.arange(1, stages)
        costs.forward_first[1:], costs.back_first[:-1] = np.arange(stages), np.arange(stages)
        costs.back_first[-1] = stages - 1
        costs.forward_from[:], costs.forward_delay[:] = before, self.hops[1:]
        costs.back_from[:], costs.back_delay[:] = after, self.hops[1:]
        for stage in range(stages):
            fill_saved(costs, stage, False, self.saved[stage], 0.0, self.kept[stage])
        return self.problem.microbatches, self.placement, costs, self.limits

    def scratch(self) -> Scratch:
        """Arrays that runs of its orders write to."""
        return make_scratch(len(self.placement), self.problem.microbatches, self.problem.devices)

    def fits(self, listed: "Listed") -> bool:
        """Whether every device holds at most its limit."""
        _, placement, costs, limits = self.for_orders()
        orders, lengths, stage_of = listed.orders, listed.lengths, self.scratch().stage_of
        peaks = (peak(orders[d], lengths[d], d, placement, costs, stage_of) for d in range(len(limits)))
        return all(each <= limit for each, limit in zip(peaks, limits, strict=True))

    def spans(self, listed: "Listed") -> tuple[float, float]:
        """The longest time from the first start to the last end of a device, and the makespan; one stage a device."""
        count, placement, costs, _ = self.for_orders()
        scratch, devices = self.scratch(), np.arange(self.problem.devices)
        run(listed.orders, listed.lengths, count, placement, costs, np.zeros(len(devices)), INFINITY, scratch)
        first_ends = scratch.finish[KINDS * count * devices + FORWARD]
        starts = np.concatenate([[0.0], first_ends[:-1] + self.hops[1:]])
        ends = scratch.finish[listed.orders[devices, listed.lengths - 1]]
        return float((ends - starts).max()), float(ends.max())

    def schedule(self, name: str, orders: Integers, lengths: Integers) -> Schedule:
        """The schedule of coded orders."""
        count = self.problem.microbatches
        actions = decode_orders(orders, lengths, len(self.placement), count)
        return Schedule(name, tuple(self.placement.tolist()), count, actions)


def instance(problem: ScheduleProblem, placement: Sequence[int]) -> Instance:
    """The arrays of a problem."""
    costs = costs_of(problem)
    device_of = np.array(placement, dtype=np.int64)
    own = [[s for s, d in enumerate(placement) if d == device] for device in range(problem.devices)]
    limit = np.inf if problem.memory_limit is None else problem.memory_limit * (1 + ROUNDING)
    changes = [saved_bytes(cost) for cost in costs]
    saved = np.array([change[Kind.F][0] for change in changes])
    kept = np.array([-change[Kind.W][1] for change in changes])
    times = np.zeros((3, len(costs)))
    times[FORWARD] = [cost.forward_s for cost in costs]
    times[INPUT] = [cost.backward_input_s for cost in costs]
    times[WEIGHT] = [cost.backward_weight_s for cost in costs]
    hops = np.zeros(len(costs))
    hops[1:] = np.where(device_of[1:] != device_of[:-1], problem.hop_s, 0.0)
    return Instance(
        problem, device_of, np.array(own, dtype=np.int64), times,
        np.array([cost.full_backward_s for cost in costs], dtype=float), hops, saved, kept,
        np.full(problem.devices, limit),
    )  # fmt: skip
