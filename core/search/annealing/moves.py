"""Moves of the annealing (actions, cuts, split backwards, recomputation, placement), and how to undo one."""

from typing import Any, NamedTuple

import numpy as np

from ...numba_cache import njit
from ...schedules.construction.shifts import draw_shift, shift
from ...timing.coding import BOTH, INFINITY, INPUT, WEIGHT
from ...timing.compiled import run
from ..problem.costing import cost_stages

STAGES, NOTHING, PLACED = -1, -2, -3
"""What a move changes, if it is not the order of one device: the stages (cuts or recomputation), nothing, or the
devices of stages."""
NEAR = 1.5
"""Mean distance in operators of most moves of cuts; the others move by a quarter of a stage."""
NEXT_CUT = 0.4
"""Probability that a move includes the next cut."""
NEXT_ACTION = 0.25
"""Probability that the next action moves with one: where memory is full, a forward alone cannot move earlier."""
EXCHANGE = 0.5
"""Probability that a move of a stage to another device moves a stage of that device back."""


class MoveShares(NamedTuple):
    """Shares of the kinds of moves; the rest are shifts of one action.

    Args:
        cut: move cuts.
        recompute: switch the recomputation of a stage.
        split: split a B, or join an I with its W.
        place: move a stage to another device, or exchange the devices of two stages.
    """

    cut: float
    recompute: float = 0.0
    split: float = 0.0
    place: float = 0.0


@njit()
def _split_or_join(d: int, orders: Any, lengths: Any, buffers: Any) -> bool:
    """Split a B of device ``d``, or replace an I directly followed by its W by a B; False if it has neither."""
    order, length = orders[d], lengths[d]
    begin = np.random.randint(length)
    for step in range(length):
        i = (begin + step) % length
        code = order[i]
        stage = buffers.scratch.stage_of[code >> 2]
        times = buffers.costs.times[:, stage]
        more = times[INPUT] + times[WEIGHT] - times[BOTH]
        if code & 3 == BOTH:
            order[i + 2 : length + 1] = order[i + 1 : length].copy()
            order[i], order[i + 1] = code - BOTH + INPUT, code - BOTH + WEIGHT
            lengths[d] += 1
            buffers.whole[stage] -= 1
            buffers.work[d] += more
            return True
        if code & 3 == INPUT and i + 1 < length and order[i + 1] == code - INPUT + WEIGHT:
            order[i] = code - INPUT + BOTH
            order[i + 1 : length - 1] = order[i + 2 : length].copy()
            lengths[d] -= 1
            buffers.whole[stage] += 1
            buffers.work[d] -= more
            return True
    return False


@njit()
def shift_cuts(cuts: Any, reach: float, next_cut: float) -> bool:
    """Move one cut, or some neighbouring ones together, by some operators; return whether that changes anything.

    Args:
        cuts: (stages + 1), changed in place; of at least two stages.
        reach: mean distance in operators.
        next_cut: probability that the next cut moves, too.
    """
    stages = cuts.shape[0] - 1
    first, width = 1 + np.random.randint(stages - 1), 1
    while first + width < stages and np.random.random() < next_cut:
        width += 1
    by = 1 + int(-reach * np.log(1 - np.random.random()))
    if np.random.random() < 0.5:
        by = max(-by, cuts[first - 1] + 1 - cuts[first])
    else:
        by = min(by, cuts[first + width] - 1 - cuts[first + width - 1])
    for cut in range(first, first + width):
        cuts[cut] += by
    return bool(by != 0)


@njit()
def _move_cuts(cuts: Any) -> bool:
    """Move cuts by a short or by a long distance."""
    stages = cuts.shape[0] - 1
    if stages == 1:
        return False
    reach = max(cuts[stages] / stages / 4.0, 1.0) if np.random.random() < 0.3 else NEAR
    return bool(shift_cuts(cuts, reach, NEXT_CUT))


@njit()
def _move_stage(s: int, to: int, candidate: Any, buffers: Any) -> None:
    """Move a stage to another device: its actions go where their starts in the last run are."""
    orders, lengths, scratch = candidate.orders, candidate.lengths, buffers.scratch
    d, count = candidate.placement[s], scratch.stage_of.shape[0] // candidate.placement.shape[0]
    moving, kept, number = np.empty(3 * count, dtype=np.int64), 0, 0
    for i in range(lengths[d]):
        code = orders[d, i]
        if scratch.stage_of[code >> 2] == s:
            moving[number] = code
            number += 1
        else:
            orders[d, kept] = code
            kept += 1
    lengths[d] = kept
    i, at = lengths[to] - 1, lengths[to] + number - 1
    lengths[to] += number
    while number > 0:  # merged from the end
        new = moving[number - 1]
        if i >= 0 and _start(orders[to, i], buffers) > _start(new, buffers):
            orders[to, at] = orders[to, i]
            i -= 1
        else:
            orders[to, at] = new
            number -= 1
        at -= 1
    candidate.placement[s] = to


@njit(inline="always")
def _start(code: int, buffers: Any) -> float:
    """Start of an action in the last run."""
    return float(buffers.scratch.finish[code] - buffers.costs.times[code & 3, buffers.scratch.stage_of[code >> 2]])


@njit()
def _move_stages(candidate: Any, buffers: Any) -> int:
    """Move a stage to another device, or exchange the devices of two stages."""
    stages, devices = candidate.placement.shape[0], candidate.lengths.shape[0]
    s, to = np.random.randint(stages), np.random.randint(devices)
    other = np.random.randint(stages) if np.random.random() < EXCHANGE else -1
    if other >= 0:
        to = candidate.placement[other]
    d, count = candidate.placement[s], buffers.scratch.stage_of.shape[0] // stages
    if d == to or candidate.lengths[to] + 3 * count > candidate.orders.shape[1]:
        return NOTHING
    if other < 0 and (candidate.placement == d).sum() == 1:  # a device keeps at least one stage
        return NOTHING
    step = run(
        candidate.orders,
        candidate.lengths,
        count,
        candidate.placement,
        buffers.costs,
        buffers.work,
        INFINITY,
        buffers.scratch,
    )
    if step < 0:
        return NOTHING
    buffers.devices[0], buffers.devices[1] = d, to
    buffers.row[:], buffers.other_row[:], buffers.placement[:] = (
        candidate.orders[d],
        candidate.orders[to],
        candidate.placement,
    )
    _move_stage(s, to, candidate, buffers)
    if other >= 0:
        _move_stage(other, d, candidate, buffers)
    return PLACED


@njit()
def make_move(shares: Any, number: int, candidate: Any, buffers: Any) -> int:
    """Draw a move and apply it to ``candidate``.

    Args:
        shares: :class:`MoveShares`.
        number: of positions on the longest path, in ``buffers.found``.
        candidate: changed.
        buffers: get what is needed to undo the move.

    Returns:
        What the move changed: ``STAGES``, ``NOTHING``, ``PLACED``, or the device with a new order.
    """
    draw = np.random.random()
    buffers.other_work[:] = buffers.work
    if draw < shares.cut + shares.recompute:
        buffers.cuts[:], buffers.recompute[:], buffers.placement[:] = (
            candidate.cuts,
            candidate.recompute,
            candidate.placement,
        )
        if draw < shares.cut:
            return STAGES if _move_cuts(candidate.cuts) else NOTHING
        s = np.random.randint(candidate.placement.shape[0])
        candidate.recompute[s] = not candidate.recompute[s]
        return STAGES
    buffers.lengths[:] = candidate.lengths
    buffers.other_whole[:] = buffers.whole
    if draw < shares.cut + shares.recompute + shares.place:
        buffers.cuts[:] = candidate.cuts
        buffers.recompute[:] = candidate.recompute
        return _move_stages(candidate, buffers)
    if draw > 1 - shares.split:
        d = np.random.randint(candidate.lengths.shape[0])
        if candidate.lengths[d] == 0:
            return NOTHING
        buffers.row[:] = candidate.orders[d]
        return d if _split_or_join(d, candidate.orders, candidate.lengths, buffers) else NOTHING
    d, start, goal = draw_shift(candidate.lengths, buffers.found, number)
    buffers.row[:] = candidate.orders[d]
    width = 1
    while np.random.random() < NEXT_ACTION and start + width < candidate.lengths[d]:
        width += 1
    order = candidate.orders[d, : candidate.lengths[d]]
    return d if _shift_together(order, start, goal, width, buffers.scratch.stage_of) else NOTHING


@njit()
def _shift_together(order: Any, start: int, goal: int, width: int, stage_of: Any) -> bool:
    """Move ``width`` actions from ``start`` on towards ``goal``, each as far as its stage allows; whether one moved."""
    moved = False
    for place in range(width):
        i = place if goal < start else width - 1 - place
        to = min(goal + i, order.shape[0] - 1)
        moved |= shift(order, start + i, to, stage_of) != start + i
    return moved


@njit()
def undo_move(changed: int, graph: Any, machine: Any, candidate: Any, buffers: Any) -> None:
    """Undo the last move, for which :func:`make_move` returned ``changed``."""
    buffers.work[:] = buffers.other_work
    if changed == STAGES:
        candidate.cuts[:] = buffers.cuts
        candidate.recompute[:] = buffers.recompute
        cost_stages(graph, machine, candidate.placement, candidate.cuts, candidate.recompute, buffers.costs)
    elif changed == PLACED:
        candidate.orders[buffers.devices[0]] = buffers.row
        candidate.orders[buffers.devices[1]] = buffers.other_row
        candidate.lengths[:], candidate.placement[:] = buffers.lengths, buffers.placement
        cost_stages(graph, machine, candidate.placement, candidate.cuts, candidate.recompute, buffers.costs)
    else:
        candidate.orders[changed] = buffers.row
        candidate.lengths[:] = buffers.lengths
        buffers.whole[:] = buffers.other_whole
