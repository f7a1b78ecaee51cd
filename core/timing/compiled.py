"""Longest path and memory of coded orders: the rules of ``core/timing/orders``, compiled.

An action is a number: ``4 · (stage · count + microbatch) + kind``, with ``count`` microbatches, which an inner loop
decodes without a division. Messages are pure delays, one for every pair of stages with an edge, including edges that
skip stages.
"""

from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..costs.costs import StageCosts
from ..numba_cache import njit
from ..plan.memory import saved_bytes
from .coding import BOTH, CODE, FORWARD, INFINITY, INPUT, KINDS, WEIGHT, Floats, Integers

UNKNOWN = -1
START, END = range(2)
"""Moments of an action."""


def _saved_factors() -> Floats:
    """The changes of stages that save, keep as inputs, or hold between I and W one byte of a microbatch."""
    free = 0.0, 0.0, 0.0
    saved, inputs = StageCosts(*free, saved_bytes=1, freed_by_input_bytes=1), StageCosts(*free, input_bytes=1)
    each = saved, inputs, StageCosts(*free, created_by_input_bytes=1)
    factors = np.zeros((2, 2, KINDS, len(each)))
    for recomputes, (size, cost) in product((False, True), enumerate(each)):
        for kind, code in CODE.items():
            factors[int(recomputes), :, code, size] = saved_bytes(cost, recomputes=recomputes)[kind]
    return factors


SAVED_FACTORS = _saved_factors()
"""The table of `memory` for compute orders: (keeps or recomputes, start or end, kind, saved or input or kept bytes)."""

MICROBATCHES_HELD: Integers = SAVED_FACTORS[0].sum(axis=(0, 2)).astype(np.int64)
"""Change of the number of microbatches with saved tensors on the action's stage, by kind."""


class StageArrays(NamedTuple):
    """Costs of stages and the edges between them; one entry per stage unless stated otherwise.

    Args:
        times: of F, I, W and B, (4, stages).
        second_forward: time of the second forward before I or B, which does not wait for the gradient; 0 without
            recomputation.
        optimizer: time of the optimizer step.
        reduce: time of the gradient reduction over the data dimension.
        scatter: time of the sum of a microbatch's gradients over replicas that share gradients; ``UNKNOWN`` if there is
            none.
        gather: time in which replicas that share anything gather the parameters after the optimizer; ``UNKNOWN`` if
            there is none.
        state: bytes of parameters, gradients and optimizer state.
        saved: bytes by which an action changes the saved tensors, at its start and at its end, (2, 4, stages): see
            :func:`fill_saved`.
        workspace: bytes of a running action.
        forward_first: offsets of each reading stage into the next three, (stages + 1).
        forward_from, forward_delay, forward_bytes: source, delay and bytes of each edge, by reading stage.
        back_first, back_from, back_delay, back_bytes: the same for gradients.
    """

    times: Floats
    second_forward: Floats
    optimizer: Floats
    reduce: Floats
    scatter: Floats
    gather: Floats
    state: Floats
    saved: Floats
    workspace: Floats
    forward_first: Integers
    forward_from: Integers
    forward_delay: Floats
    forward_bytes: Floats
    back_first: Integers
    back_from: Integers
    back_delay: Floats
    back_bytes: Floats

    @property
    def after_forward(self) -> Floats:
        """Bytes that a microbatch holds between its F and its backward."""
        return np.asarray(self.saved[START, FORWARD])

    @property
    def after_input(self) -> Floats:
        """Bytes that a microbatch holds between its I and its W."""
        return np.asarray(-self.saved[END, WEIGHT])

    @property
    def second_forward_bytes(self) -> Floats:
        """Bytes that the second forward adds to the saved tensors while B or I runs."""
        return np.asarray(self.saved[START, BOTH])


def make_stage_arrays(stages: int, edges: int) -> StageArrays:
    """Arrays of zeros for at most that many edges, to be filled."""

    def floats() -> Floats:
        return np.zeros(stages)

    def edge_arrays() -> tuple[Integers, Integers, Floats, Floats]:
        integers = np.zeros(stages + 1, dtype=np.int64), np.zeros(edges, dtype=np.int64)
        return *integers, np.zeros(edges), np.zeros(edges)

    return StageArrays(
        np.zeros((KINDS, stages)), floats(), floats(), floats(), np.full(stages, float(UNKNOWN)),
        np.full(stages, float(UNKNOWN)), floats(), np.zeros((2, KINDS, stages)), floats(),
        *edge_arrays(), *edge_arrays(),
    )  # fmt: skip


class Scratch(NamedTuple):
    """Arrays that a run writes to, allocated once for many runs (see :func:`make_scratch`).

    Args:
        finish: end of every action by code.
        cause: per action the action on another device that it waited for, or ``UNKNOWN``.
        where: per action its position in its device's order.
        place, free, left: per device: its position, when it is free, and its remaining work.
        last: per stage the end of its last weight gradient.
        summed: per stage the end of its last sum of a microbatch's gradients.
        queue: per device when its queue of these sums, and of gathers, is free.
        stage_of: stage of ``stage · count + microbatch``.
    """

    finish: Floats
    cause: Integers
    where: Integers
    place: Integers
    free: Floats
    left: Floats
    last: Floats
    summed: Floats
    queue: Floats
    stage_of: Integers


def make_scratch(stages: int, count: int, devices: int) -> Scratch:
    """Scratch for runs of ``count`` microbatches."""
    size = KINDS * stages * count
    return Scratch(
        np.empty(size), np.empty(size, dtype=np.int64), np.zeros(size, dtype=np.int64),
        np.zeros(devices, dtype=np.int64), np.zeros(devices), np.zeros(devices), np.zeros(stages), np.zeros(stages),
        np.zeros(devices), np.repeat(np.arange(stages), count),
    )  # fmt: skip


@njit(inline="always")
def _begin(kind: int, place: int, stage: int, count: int, now: float, costs: Any, finish: Any) -> tuple[float, int]:
    """When an action can begin on a device that is free ``now``, and the action on another device that it waits for.

    Negative if an input has not been computed yet.
    """
    at, why = now, UNKNOWN
    if kind == FORWARD:
        for e in range(costs.forward_first[stage], costs.forward_first[stage + 1]):
            source = KINDS * (place + (costs.forward_from[e] - stage) * count)
            end = finish[source]
            if end < 0:
                return -1.0, UNKNOWN
            if end + costs.forward_delay[e] > at:
                at, why = end + costs.forward_delay[e], source
        return at, why
    if kind == WEIGHT:
        return (at if finish[KINDS * place + INPUT] >= 0 else -1.0), UNKNOWN
    if finish[KINDS * place] < 0:
        return -1.0, UNKNOWN
    at += costs.second_forward[stage]
    for e in range(costs.back_first[stage], costs.back_first[stage + 1]):
        source = KINDS * (place + (costs.back_from[e] - stage) * count) + INPUT
        end = finish[source]
        if end < 0:
            return -1.0, UNKNOWN
        if end + costs.back_delay[e] > at:
            at, why = end + costs.back_delay[e], source
    return at, why


@njit(inline="always")
def sum_gradients(d: int, kind: int, stage: int, now: float, scatter: Any, summed: Any, queue: Any) -> None:
    """Issue the sum of a microbatch's gradients if the action that ends now completes them: sums of a device run one
    after another, and the stage's next action that computes gradients waits for it."""
    if kind in (WEIGHT, BOTH) and scatter[stage] >= 0:
        queue[d] = max(queue[d], now) + scatter[stage]
        summed[stage] = queue[d]


@njit()
def run(
    orders: Any, lengths: Any, count: int, placement: Any, costs: Any, work: Any, stop: float, scratch: Any
) -> float:
    """The longest path through the orders, reductions and optimizer included.

    Args:
        orders: codes, (devices, longest order).
        lengths: how many actions each device has.
        count: microbatches.
        placement: device of every stage.
        costs: :class:`StageArrays`.
        work: per device the time of its actions and optimizer (see :func:`work_of`).
        stop: give up once the step is certain to exceed this.
        scratch: :class:`Scratch`; ``finish``, ``cause`` and ``where`` are filled. A B also fills its I's entries, so
            that readers of a gradient look in one place. ``free`` then contains the ends of devices.

    Returns:
        The step: the latest end of a device. A stage's optimizer step follows its device's compute and the reduction of
        its gradients; reductions run one after another, concurrently with compute, and so do gathers of parameters.
        Infinite above ``stop``; negative if the orders deadlock or an input is never computed.
    """
    finish, where, cause, free, left = scratch.finish, scratch.where, scratch.cause, scratch.free, scratch.left
    finish[:] = -1.0
    scratch.place[:] = 0
    free[:] = 0.0
    scratch.summed[:] = 0.0
    scratch.queue[:] = 0.0
    left[:] = work
    # In variables: reading these fields in the loop made a search take 4.7 times as long.
    scatter, summed, queue = costs.scatter, scratch.summed, scratch.queue
    sums = scatter.max() >= 0
    todo = lengths.sum()
    while todo > 0:
        before = todo
        for d in range(orders.shape[0]):
            i, now, rest = scratch.place[d], free[d], left[d]
            first = i
            while i < lengths[d]:
                code = orders[d, i]
                kind, place = code & 3, code >> 2
                stage = scratch.stage_of[place]
                at, why = _begin(kind, place, stage, count, now, costs, finish)
                if at < 0:
                    break
                if sums and kind in (WEIGHT, BOTH) and summed[stage] > at:
                    at, why = summed[stage], UNKNOWN
                time = costs.times[kind, stage]
                now = at + time
                rest -= time
                if kind in (INPUT, BOTH):
                    rest -= costs.second_forward[stage]
                finish[code], cause[code], where[code] = now, why, i
                if kind == BOTH:
                    finish[code - 2], cause[code - 2], where[code - 2] = now, why, i
                if sums:
                    sum_gradients(d, kind, stage, now, scatter, summed, queue)
                i += 1
            if i > first:
                todo -= i - first
                scratch.place[d], free[d], left[d] = i, now, rest
                if now + rest > stop:
                    return INFINITY
        if todo == before:
            return -1.0
    return end_of_step(placement, count, costs, scratch)


@njit()
def count_whole(orders: Any, lengths: Any, stage_of: Any, whole: Any) -> None:
    """Fill ``whole`` with the number of backwards of each stage that are not split."""
    whole[:] = 0
    for d in range(orders.shape[0]):
        for i in range(lengths[d]):
            if orders[d, i] & 3 == BOTH:
                whole[stage_of[orders[d, i] >> 2]] += 1


@njit()
def work_of(count: int, placement: Any, costs: Any, whole: Any, work: Any) -> None:
    """Fill ``work`` with the time that each device computes, its optimizer included."""
    work[:] = 0.0
    for s in range(placement.shape[0]):
        times = costs.times[:, s]
        halves = (count - whole[s]) * (times[INPUT] + times[WEIGHT])
        work[placement[s]] += costs.optimizer[s] + count * (times[FORWARD] + costs.second_forward[s]) + halves
        work[placement[s]] += whole[s] * times[BOTH]


@njit()
def end_of_step(placement: Any, count: int, costs: Any, scratch: Any) -> float:
    """The end of the step; ``free`` is changed from the ends of compute to the ends of devices."""
    stages, reduced = placement.shape[0], 0.0
    for stage in range(stages):
        reduced += costs.reduce[stage]
    if reduced > 0:  # in the order of each stage's last backward on its device, one after another
        for stage in range(stages):
            code = KINDS * (stage * count + count - 1)
            scratch.last[stage] = scratch.where[code + (BOTH if scratch.finish[code + BOTH] >= 0 else WEIGHT)]
        scratch.left[:] = 0.0
        for stage in np.argsort(scratch.last):
            d, code = placement[stage], KINDS * (stage * count + count - 1)
            whole = max(scratch.finish[code + WEIGHT], scratch.finish[code + BOTH])
            scratch.left[d] = max(scratch.left[d], whole) + costs.reduce[stage]
            scratch.last[stage] = scratch.left[d]
        for d in range(scratch.queue.shape[0]):  # gathers follow all reductions of their device
            scratch.queue[d] = max(scratch.queue[d], scratch.left[d])
    for stage in range(stages):
        d = placement[stage]
        if reduced > 0:
            scratch.free[d] = max(scratch.free[d], scratch.last[stage])
        scratch.free[d] = max(scratch.free[d], scratch.summed[stage]) + costs.optimizer[stage]
        if costs.gather[stage] >= 0:
            scratch.queue[d] = max(scratch.queue[d], scratch.free[d]) + costs.gather[stage]
    for d in range(scratch.free.shape[0]):
        scratch.free[d] = max(scratch.free[d], scratch.queue[d])
    return float(scratch.free.max())


@njit(inline="always")
def saved_change(recomputes: bool, moment: int, kind: int, saved: float, inputs: float, kept: float) -> float:
    """Change of the saved tensors by an action, in bytes; arguments as in :func:`fill_saved`."""
    row = SAVED_FACTORS[int(recomputes), moment, kind]
    return float(row[0] * saved + row[1] * inputs + row[2] * kept)


@njit(inline="always")
def fill_saved(out: Any, stage: int, recomputes: bool, saved: float, inputs: float, kept: float) -> None:
    """Fill ``saved`` of one stage from the table of `memory`.

    Args:
        out: :class:`StageArrays`.
        stage: whose.
        recomputes: whether the stage does.
        saved, inputs, kept: bytes of a microbatch's saved tensors over its life, as in ``StageCosts``.
    """
    for moment in range(2):
        for kind in range(KINDS):
            out.saved[moment, kind, stage] = saved_change(recomputes, moment, kind, saved, inputs, kept)


@njit()
def peak(order: Any, length: int, d: int, placement: Any, costs: Any, stage_of: Any) -> float:
    """The peak bytes of device ``d`` in this order: state, saved tensors and the running action's workspace.

    It is the sum of `memory.held_bytes` for coded orders; searches run it for every candidate.
    """
    held = 0.0
    for stage in range(placement.shape[0]):
        if placement[stage] == d:
            held += costs.state[stage]
    most = held
    for code in order[:length]:
        kind, stage = code & 3, stage_of[code >> 2]
        held += costs.saved[START, kind, stage]
        most = max(most, held + costs.workspace[stage])
        held += costs.saved[END, kind, stage]
        most = max(most, held)
    return most
