"""Free placement: every operator is a stage of its own and may be on any device; then stages are joined again.

The order of a plan's operators is at least as fast as the order of its stages and holds no more, because each of their
actions is a sequence of the operators' actions. It has more freedom: operators move between devices one by one, so
devices get unequal numbers of stages, in any order along the pipeline.

Of few operators, `packed` compares all placements with which one microbatch at a time fits in memory. An order that
ends each microbatch before the next one holds the least: a device needs the state of its operators, and at most the
saved tensors up to one of them plus the workspace of that one.
"""

from collections.abc import Iterator

import numpy as np

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
    return Walk(walk.setting, walk.schedule, candidate, walk.offload, walk.annealed, walk.recomputes)


PLACEMENTS = 20_000
"""Largest number of placements of all operators that are compared: larger graphs have fewer to gain."""


def packed(setting: Setting, most: int) -> Iterator[Walk]:
    """Walks whose order runs one microbatch after another, on the most promising placements that fit; none if none fit,
    or if there are more than ``PLACEMENTS``.

    Args:
        setting: with operators that are not cut into stages yet.
        most: number of walks.
    """
    for device_of in _promising(setting)[:most]:
        walk = one_by_one(setting, device_of, np.flatnonzero(np.diff(device_of)) + 1)  # runs of operators as stages
        walk.evaluate()
        walk.free_buffers()
        # A stage saves all of its tensors at its start; its operators may need less.
        yield walk if walk.excess == 0 else one_by_one(setting, device_of, np.arange(1, len(device_of)))


def _promising(setting: Setting) -> Integers:
    """The placements of the operators that fit with one microbatch at a time, by the work of the busiest device and the
    time of the messages, shortest first, (placements, operators)."""
    arrays, machine, devices = setting.arrays, setting.machine, setting.devices
    nodes, kinds, limits = arrays.sums.shape[2] - 1, machine.kind.tolist(), machine.limits
    if not 1 < devices <= nodes or devices**nodes > PLACEMENTS:
        return np.empty((0, nodes), dtype=np.int64)
    device_of = np.indices((devices,) * nodes).reshape(nodes, -1).T
    if len(set(kinds)) == len(set(limits.tolist())) == 1:  # equal devices are numbered by their first use
        used = np.maximum.accumulate(device_of, axis=1)
        device_of = device_of[(device_of[:, 0] == 0) & (np.diff(used, axis=1) <= 1).all(axis=1)]
    each, busiest = np.diff(arrays.sums, axis=2), np.zeros(len(device_of))
    fits = np.ones(len(device_of), dtype=np.bool_)
    for device, kind in enumerate(kinds):
        own = device_of == device
        saved = np.cumsum(own * each[kind, SAVED], axis=1)
        running = np.where(own, saved + arrays.largest[kind, 0], 0.0).max(axis=1)
        fits &= own.any(axis=1) & (own @ each[kind, STATE] + running <= limits[device])
        busiest = np.maximum(busiest, own @ each[kind, : WEIGHT + 1].sum(axis=0))
    messages = np.zeros(len(device_of))
    for tensor, node in enumerate(arrays.source.tolist()):
        for edge in range(arrays.first[tensor], arrays.first[tensor + 1]):
            a, b = device_of[:, node], device_of[:, arrays.reader[edge]]
            messages += machine.latency[a, b] + arrays.size[edge] / machine.rate[a, b]
    order = np.argsort(setting.microbatches * busiest + 2 * messages, kind="stable")
    return np.ascontiguousarray(device_of[order[fits[order]]])


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
    return Walk(setting, PACKED, candidate, annealed=True)
