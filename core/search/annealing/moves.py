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
def _split_or_join(d: int, orders: Any, lengths: Any, bench: Any) -> bool:
    """Split a B of device ``d``, or make an I with its W behind it a B; False where it has neither."""
    order, length = orders[d], lengths[d]
    begin = np.random.randint(length)
    for step in range(length):
        i = (begin + step) % length
        code = order[i]
        stage = bench.room.stage_of[code >> 2]
        times = bench.costs.times[:, stage]
        more = times[INPUT] + times[WEIGHT] - times[BOTH]
        if code & 3 == BOTH:
            order[i + 2 : length + 1] = order[i + 1 : length].copy()
            order[i], order[i + 1] = code - BOTH + INPUT, code - BOTH + WEIGHT
            lengths[d] += 1
            bench.whole[stage] -= 1
            bench.work[d] += more
            return True
        if code & 3 == INPUT and i + 1 < length and order[i + 1] == code - INPUT + WEIGHT:
            order[i] = code - INPUT + BOTH
            order[i + 1 : length - 1] = order[i + 2 : length].copy()
            lengths[d] -= 1
            bench.whole[stage] += 1
            bench.work[d] -= more
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
def move(ways: Any, number: int, place: Any, bench: Any) -> int:
    """Make some move; what has to be judged anew: ``STAGES``, ``NOTHING``, or a device whose order is another."""
    draw = np.random.random()
    bench.other_work[:] = bench.work
    if draw < ways.cut + ways.recompute:
        bench.cuts[:] = place.cuts
        bench.recompute[:] = place.recompute
        if draw < ways.cut:
            return STAGES if _move_cuts(place.cuts) else NOTHING
        s = np.random.randint(place.placement.shape[0])
        place.recompute[s] = not place.recompute[s]
        return STAGES
    bench.lengths[:] = place.lengths
    bench.other_whole[:] = bench.whole
    if draw > 1 - ways.split:
        d = np.random.randint(place.lengths.shape[0])
        bench.row[:] = place.orders[d]
        return d if _split_or_join(d, place.orders, place.lengths, bench) else NOTHING
    d, start, goal = draw_shift(place.lengths, bench.found, number)
    bench.row[:] = place.orders[d]
    return d if shift(place.orders[d], start, goal, bench.room.stage_of) != start else NOTHING


@njit()
def take_back(what: int, graph: Any, machine: Any, place: Any, bench: Any) -> None:
    """Undo the last move."""
    bench.work[:] = bench.other_work
    if what == STAGES:
        place.cuts[:] = bench.cuts
        place.recompute[:] = bench.recompute
        cost_stages(graph, machine, place.placement, place.cuts, place.recompute, bench.costs)
    else:
        place.orders[what] = bench.row
        place.lengths[:] = bench.lengths
        bench.whole[:] = bench.other_whole
