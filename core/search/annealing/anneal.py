"""Cuts and orders annealed together on the costs that they really have: one compiled loop, deterministic for its seed.

A move shifts one action of a device's order (as `schedules/local` does: mostly one that the longest path runs
through), splits a backward or makes one whole again, moves cuts by some operators, or has a stage recompute or not.
Each is judged by the step that results, every device's memory and every edge included; going from one kind to the
other is what neither a partition for a given schedule nor a schedule for a given partition finds. Bytes above a limit
count as time, and as more than any move could gain, so that a start above its limits finds its way down first.
"""

from typing import Any

import numpy as np

from ...evaluate.coding import INFINITY
from ...evaluate.compiled import count_whole, peak, run, work_of
from ...numba_cache import njit
from ...schedules.decode import TAIL
from ...schedules.shifts import critical, metropolis
from ..problem.costing import cost_stages
from .moves import NOTHING, STAGES, move, take_back

EXCESS = 10.0
"""Steps that it counts to hold as much above a device's limit as the limit itself."""
ABOVE = 1e6
"""Seconds that it counts to hold anything above a limit: more than any step, so that whatever fits comes first."""


@njit()
def excess_of(place: Any, machine: Any, costs: Any, stage_of: Any, peaks: Any) -> float:
    """Fill ``peaks`` with the bytes of every device; what they hold above their limits, as shares of these."""
    total = 0.0
    for d in range(place.orders.shape[0]):
        peaks[d] = peak(place.orders[d], place.lengths[d], d, place.placement, costs, stage_of)[0]
        total += max(peaks[d] - machine.limits[d], 0.0) / machine.limits[d]
    return total


@njit()
def judge(count: int, place: Any, machine: Any, buffers: Any) -> tuple[float, float, float]:
    """Step, excess and value of a place whose stages are costed; ``work`` and ``peaks`` are filled.

    The step is negative where the orders deadlock. The value is what annealing makes small.
    """
    count_whole(place.orders, place.lengths, buffers.scratch.stage_of, buffers.whole)
    work_of(count, place.placement, buffers.costs, buffers.whole, buffers.work)
    excess = excess_of(place, machine, buffers.costs, buffers.scratch.stage_of, buffers.peaks)
    step = run(
        place.orders, place.lengths, count, place.placement, buffers.costs, buffers.work, INFINITY, buffers.scratch
    )
    return step, excess, _value(step, excess, buffers.scratch)


@njit()
def _value(step: float, excess: float, scratch: Any) -> float:
    return float(step * (1 + EXCESS * excess) + TAIL * scratch.free.mean() + (ABOVE if excess > 0 else 0.0))


@njit()
def _other_stages(
    count: int, enough: float, graph: Any, machine: Any, place: Any, buffers: Any
) -> tuple[float, float, float]:
    """Step, excess and value of the place with the cuts and the recomputation it has now; infinite above ``enough``."""
    cost_stages(graph, machine, place.placement, place.cuts, place.recompute, buffers.costs)
    buffers.other_work[:] = buffers.work
    work_of(count, place.placement, buffers.costs, buffers.whole, buffers.work)
    if buffers.work.max() > enough:
        return INFINITY, 0.0, INFINITY
    buffers.other_peaks[:] = buffers.peaks
    for s in range(place.placement.shape[0]):
        same = buffers.cuts[s] == place.cuts[s] and buffers.cuts[s + 1] == place.cuts[s + 1]
        if not same or place.recompute[s] or buffers.recompute[s]:
            buffers.other_peaks[place.placement[s]] = -1.0
    excess = 0.0
    for d in range(place.orders.shape[0]):
        if buffers.other_peaks[d] < 0:
            most = peak(place.orders[d], place.lengths[d], d, place.placement, buffers.costs, buffers.scratch.stage_of)[
                0
            ]
            buffers.other_peaks[d] = most
        excess += max(buffers.other_peaks[d] - machine.limits[d], 0.0) / machine.limits[d]
    step, value = _timed(count, enough, excess, place, buffers)
    return step, excess, value


@njit()
def _other_order(
    count: int, enough: float, excess: float, d: int, machine: Any, place: Any, buffers: Any
) -> tuple[float, float, float]:
    """Step, excess and value of the place with the order that device ``d`` has now; infinite above ``enough``."""
    limit = machine.limits[d]
    most = peak(place.orders[d], place.lengths[d], d, place.placement, buffers.costs, buffers.scratch.stage_of)[0]
    buffers.other_peaks[:] = buffers.peaks
    buffers.other_peaks[d] = most
    excess += (max(most - limit, 0.0) - max(buffers.peaks[d] - limit, 0.0)) / limit
    excess = excess if excess > 1e-12 else 0.0
    step, value = _timed(count, enough, excess, place, buffers)
    return step, excess, value


@njit()
def _timed(count: int, enough: float, excess: float, place: Any, buffers: Any) -> tuple[float, float]:
    stop = (enough - ABOVE if excess > 0 else enough) / (1 + EXCESS * excess)
    if buffers.work.max() > stop:
        return INFINITY, INFINITY
    step = run(place.orders, place.lengths, count, place.placement, buffers.costs, buffers.work, stop, buffers.scratch)
    if step < 0:
        return INFINITY, INFINITY
    return step, _value(step, excess, buffers.scratch)


@njit()
def anneal(
    seed: int,
    moves: int,
    begin: float,
    end: float,
    warmth: float,
    ways: Any,
    target: float,
    count: int,
    graph: Any,
    machine: Any,
    place: Any,
    best: Any,
    best_value: float,
    buffers: Any,
) -> float:
    """Walk on from ``place``, which changes; ``best`` becomes the best place met that is better than ``best_value``.

    Args:
        seed: of the random numbers.
        moves: places to look at, the present one included.
        begin, end: shares of the whole annealing that are over before and after these moves.
        warmth: the temperature at its very begin as a share of the step; it falls to nothing at its very end.
        ways: :class:`Ways`.
        target: a step that ends the walk.
        count: microbatches.
        graph, machine: see `costing`.
        place, best: :class:`Place`.
        best_value: of ``best``; infinite takes the present place first.
        buffers: :class:`Buffers`, with costs of the stages of ``place``.

    Returns:
        The value of ``best``.
    """
    np.random.seed(seed)
    step, excess, value = judge(count, place, machine, buffers)
    if step >= 0 and value < best_value:
        best_value = value
        _keep(place, best)
    scale = step
    number = critical(place.orders, place.lengths, place.placement, buffers.scratch, buffers.found)
    for tried in range(1, moves):
        left = 1 - (begin + (end - begin) * tried / moves)
        enough = metropolis(value, warmth * scale * left * left) * (1 + 1e-12)
        what = move(ways, number, place, buffers)
        if what == NOTHING:
            continue
        if what == STAGES:
            new_step, new_excess, new_value = _other_stages(count, enough, graph, machine, place, buffers)
        else:
            new_step, new_excess, new_value = _other_order(count, enough, excess, what, machine, place, buffers)
        if new_value > enough:
            take_back(what, graph, machine, place, buffers)
            continue
        step, excess, value = new_step, new_excess, new_value
        buffers.peaks[:] = buffers.other_peaks
        number = critical(place.orders, place.lengths, place.placement, buffers.scratch, buffers.found)
        if value < best_value:
            best_value = value
            _keep(place, best)
            if step <= target and excess == 0:
                break
    return best_value


@njit()
def every_cut(count: int, graph: Any, machine: Any, place: Any, best: Any, best_value: float, buffers: Any) -> float:
    """Look at all cuts there are, for the orders of ``place``; arguments and result as of :func:`anneal`."""
    cuts, stages = place.cuts, place.placement.shape[0]
    nodes = cuts[stages]
    cuts[:stages] = np.arange(stages)
    while True:
        cost_stages(graph, machine, place.placement, cuts, place.recompute, buffers.costs)
        step, _, value = judge(count, place, machine, buffers)
        if step >= 0 and value < best_value:
            best_value = value
            _keep(place, best)
        cut = stages - 1
        while cut > 0 and cuts[cut] == nodes - (stages - cut):
            cut -= 1
        if cut == 0:
            return best_value
        cuts[cut] += 1
        for later in range(cut + 1, stages):
            cuts[later] = cuts[later - 1] + 1


@njit()
def _keep(place: Any, best: Any) -> None:
    """Copy what a walk changes."""
    best.cuts[:] = place.cuts
    best.recompute[:] = place.recompute
    best.orders[:] = place.orders
    best.lengths[:] = place.lengths
