"""Moves of the annealing: of actions, of cuts, of what is split and what recomputes; and how to take one back."""

from typing import Any, NamedTuple

import numpy as np

from ...evaluate.coding import BOTH, INPUT, WEIGHT
from ...numba_cache import njit
from ...schedules.shifts import draw_shift, shift
from ..problem.costing import cost_stages

STAGES, NOTHING = -1, -2
"""What a move can change beside the order of a device."""
NEAR = 1.5
"""Mean reach in operators of most moves of cuts; the others reach a quarter of a stage."""


class Ways(NamedTuple):
    """How often, as shares of all moves, a move is of a kind that is not a shift.

    Args:
        cut: moves cuts.
        recompute: has a stage recompute or not.
        split: splits a backward or makes it whole.
    """

    cut: float
    recompute: float = 0.0
    split: float = 0.0


@njit()
def _split_or_join(d: int, orders: Any, lengths: Any, buffers: Any) -> bool:
    """Split a B of device ``d``, or make an I with its W behind it a B; False where it has neither."""
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
def shift_cuts(cuts: Any, reach: float, again: float) -> bool:
    """Move one cut, or a few that follow one another, by some nodes; whether that changes anything.

    Args:
        cuts: (stages + 1), changed; of two stages at least.
        reach: how far they are moved on average, in nodes.
        again: how probable it is that the next cut moves along.
    """
    stages = cuts.shape[0] - 1
    first, width = 1 + np.random.randint(stages - 1), 1
    while first + width < stages and np.random.random() < again:
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
    """Move cuts, near or far."""
    stages = cuts.shape[0] - 1
    if stages == 1:
        return False
    reach = max(cuts[stages] / stages / 4.0, 1.0) if np.random.random() < 0.3 else NEAR
    return bool(shift_cuts(cuts, reach, 0.4))


@njit()
def move(ways: Any, number: int, place: Any, buffers: Any) -> int:
    """Make some move; what has to be judged anew: ``STAGES``, ``NOTHING``, or a device whose order is another."""
    draw = np.random.random()
    buffers.other_work[:] = buffers.work
    if draw < ways.cut + ways.recompute:
        buffers.cuts[:] = place.cuts
        buffers.recompute[:] = place.recompute
        if draw < ways.cut:
            return STAGES if _move_cuts(place.cuts) else NOTHING
        s = np.random.randint(place.placement.shape[0])
        place.recompute[s] = not place.recompute[s]
        return STAGES
    buffers.lengths[:] = place.lengths
    buffers.other_whole[:] = buffers.whole
    if draw > 1 - ways.split:
        d = np.random.randint(place.lengths.shape[0])
        buffers.row[:] = place.orders[d]
        return d if _split_or_join(d, place.orders, place.lengths, buffers) else NOTHING
    d, start, goal = draw_shift(place.lengths, buffers.found, number)
    buffers.row[:] = place.orders[d]
    return d if shift(place.orders[d], start, goal, buffers.scratch.stage_of) != start else NOTHING


@njit()
def take_back(what: int, graph: Any, machine: Any, place: Any, buffers: Any) -> None:
    """Undo the last move."""
    buffers.work[:] = buffers.other_work
    if what == STAGES:
        place.cuts[:] = buffers.cuts
        place.recompute[:] = buffers.recompute
        cost_stages(graph, machine, place.placement, place.cuts, place.recompute, buffers.costs)
    else:
        place.orders[what] = buffers.row
        place.lengths[:] = buffers.lengths
        buffers.whole[:] = buffers.other_whole
