"""Simulated annealing of cuts and orders together: one compiled loop, deterministic for its seed.

A move shifts one action of a device's order (`schedules/construction/shifts`: mostly one on the longest path), splits a
B or joins an I with its W, moves cuts by some operators, or switches the recomputation of a stage. Each move is
evaluated with the real costs: the time of the step with every edge and collective, and every device's memory.
Alternating the kinds of moves finds plans that neither a partition for a given schedule nor a schedule for a given
partition contains.

The objective adds a penalty for bytes above a limit. It is larger than any gain of time, so that the memory is brought
within the limits first.
"""

from typing import Any

import numpy as np

from ...numba_cache import njit
from ...schedules.construction.list_scheduler import TAIL
from ...schedules.construction.shifts import critical, metropolis
from ...timing.coding import INFINITY
from ...timing.compiled import count_whole, peak, run, work_of
from ...timing.contended import run_contended
from ..problem.costing import cost_stages
from .moves import NOTHING, PLACED, STAGES, make_move, undo_move

EXCESS = 10.0
"""Penalty in steps for a device's bytes above its limit, per multiple of the limit."""
ABOVE = 1e6
"""Penalty in seconds for any bytes above a limit: more than any step, so that all that fits is better."""


@njit()
def excess_of(candidate: Any, machine: Any, costs: Any, stage_of: Any, peaks: Any) -> float:
    """Fill ``peaks`` with the peak bytes of every device; return the sum of excess ÷ limit over the devices."""
    total = 0.0
    for d in range(candidate.orders.shape[0]):
        peaks[d] = peak(candidate.orders[d], candidate.lengths[d], d, candidate.placement, costs, stage_of)
        total += max(peaks[d] - machine.limits[d], 0.0) / machine.limits[d]
    return total


@njit()
def evaluate_candidate(count: int, candidate: Any, machine: Any, buffers: Any) -> tuple[float, float, float]:
    """Step, excess and objective of a candidate; ``work`` and ``peaks`` of the buffers are filled.

    The buffers have the costs of the candidate's stages. The step is negative if the orders deadlock.
    """
    count_whole(candidate.orders, candidate.lengths, buffers.scratch.stage_of, buffers.whole)
    work_of(count, candidate.placement, buffers.costs, buffers.whole, buffers.work)
    excess = excess_of(candidate, machine, buffers.costs, buffers.scratch.stage_of, buffers.peaks)
    step = step_of(count, INFINITY, candidate, machine, buffers)
    return step, excess, _objective(step, excess, buffers.scratch)


@njit()
def step_of(count: int, stop: float, candidate: Any, machine: Any, buffers: Any) -> float:
    """The step, with or without shared links; infinite above ``stop``, negative if the orders deadlock."""
    costs, work, scratch = buffers.costs, buffers.work, buffers.scratch
    if machine.contended:
        return run_contended(
            candidate.orders, candidate.lengths, count, candidate.placement, costs, machine.latency, machine.rate,
            machine.links, work, stop, scratch,
        )  # fmt: skip
    return run(candidate.orders, candidate.lengths, count, candidate.placement, costs, work, stop, scratch)


@njit()
def _objective(step: float, excess: float, scratch: Any) -> float:
    return float(step * (1 + EXCESS * excess) + TAIL * scratch.free.mean() + (ABOVE if excess > 0 else 0.0))


@njit()
def _peak_of(d: int, candidate: Any, buffers: Any) -> float:
    """Peak bytes of device ``d``."""
    order, length, stage_of = candidate.orders[d], candidate.lengths[d], buffers.scratch.stage_of
    return float(peak(order, length, d, candidate.placement, buffers.costs, stage_of))


@njit()
def _evaluate_new_stages(
    count: int, threshold: float, graph: Any, machine: Any, candidate: Any, buffers: Any
) -> tuple[float, float, float]:
    """Step, excess and objective after a move of cuts, recomputation or placement; infinite if above ``threshold``."""
    cost_stages(graph, machine, candidate.placement, candidate.cuts, candidate.recompute, buffers.costs)
    buffers.other_work[:] = buffers.work
    work_of(count, candidate.placement, buffers.costs, buffers.whole, buffers.work)
    if buffers.work.max() > threshold:
        return INFINITY, 0.0, INFINITY
    buffers.other_peaks[:] = buffers.peaks
    for s in range(candidate.placement.shape[0]):
        same = buffers.cuts[s] == candidate.cuts[s] and buffers.cuts[s + 1] == candidate.cuts[s + 1]
        if not same or candidate.recompute[s] or buffers.recompute[s]:
            buffers.other_peaks[candidate.placement[s]] = -1.0
        if buffers.placement[s] != candidate.placement[s]:
            buffers.other_peaks[candidate.placement[s]] = buffers.other_peaks[buffers.placement[s]] = -1.0
    excess = 0.0
    for d in range(candidate.orders.shape[0]):
        if buffers.other_peaks[d] < 0:
            buffers.other_peaks[d] = _peak_of(d, candidate, buffers)
        excess += max(buffers.other_peaks[d] - machine.limits[d], 0.0) / machine.limits[d]
    step, value = _step_and_objective(count, threshold, excess, candidate, machine, buffers)
    return step, excess, value


@njit()
def _evaluate_new_order(
    count: int, threshold: float, excess: float, d: int, machine: Any, candidate: Any, buffers: Any
) -> tuple[float, float, float]:
    """Step, excess and objective after a move in the order of device ``d``; infinite if above ``threshold``."""
    limit, most = machine.limits[d], _peak_of(d, candidate, buffers)
    buffers.other_peaks[:] = buffers.peaks
    buffers.other_peaks[d] = most
    excess += (max(most - limit, 0.0) - max(buffers.peaks[d] - limit, 0.0)) / limit
    excess = excess if excess > 1e-12 else 0.0
    step, value = _step_and_objective(count, threshold, excess, candidate, machine, buffers)
    return step, excess, value


@njit()
def _step_and_objective(
    count: int, threshold: float, excess: float, candidate: Any, machine: Any, buffers: Any
) -> tuple[float, float]:
    """Step and objective of the candidate; the evaluation ends early above ``threshold``."""
    stop = (threshold - ABOVE if excess > 0 else threshold) / (1 + EXCESS * excess)
    if buffers.work.max() > stop:
        return INFINITY, INFINITY
    step = step_of(count, stop, candidate, machine, buffers)
    if step < 0:
        return INFINITY, INFINITY
    return step, _objective(step, excess, buffers.scratch)


@njit()
def anneal(
    seed: int,
    moves: int,
    begin: float,
    end: float,
    temperature: float,
    shares: Any,
    target: float,
    count: int,
    graph: Any,
    machine: Any,
    candidate: Any,
    best: Any,
    best_value: float,
    buffers: Any,
) -> float:
    """Anneal ``candidate`` in place; ``best`` becomes the best candidate found, if it is better than ``best_value``.

    Args:
        moves: number of candidates to evaluate, including the initial one.
        begin, end: shares of the whole annealing that are over before and after these moves.
        temperature: at the start of the whole annealing, as a share of the step; it falls to 0 at its end.
        shares: :class:`MoveShares`.
        target: a step that ends the annealing.
        graph, machine: see `costing`.
        candidate, best: :class:`Candidate`.
        best_value: objective of ``best``; infinite to replace ``best`` by the initial candidate.
        buffers: :class:`Buffers`, with costs of the stages of ``candidate``.

    Returns:
        The objective of ``best``.
    """
    np.random.seed(seed)
    step, excess, value = evaluate_candidate(count, candidate, machine, buffers)
    if step >= 0 and value < best_value:
        best_value = value
        _copy_into(best, candidate)
    scale = step
    number = critical(candidate.orders, candidate.lengths, candidate.placement, buffers.scratch, buffers.found)
    for tried in range(1, moves):
        left = 1 - (begin + (end - begin) * tried / moves)
        threshold = metropolis(value, temperature * scale * left * left) * (1 + 1e-12)
        changed = make_move(shares, number, candidate, buffers)
        if changed == NOTHING:
            continue
        if changed in (STAGES, PLACED):
            new_step, new_excess, new_value = _evaluate_new_stages(count, threshold, graph, machine, candidate, buffers)
        else:
            new_step, new_excess, new_value = _evaluate_new_order(
                count, threshold, excess, changed, machine, candidate, buffers
            )
        if new_value > threshold:
            undo_move(changed, graph, machine, candidate, buffers)
            continue
        step, excess, value = new_step, new_excess, new_value
        buffers.peaks[:] = buffers.other_peaks
        number = critical(candidate.orders, candidate.lengths, candidate.placement, buffers.scratch, buffers.found)
        if value < best_value:
            best_value = value
            _copy_into(best, candidate)
            if step <= target and excess == 0:
                break
    return best_value


@njit()
def try_every_cut(
    count: int, graph: Any, machine: Any, candidate: Any, best: Any, best_value: float, buffers: Any
) -> float:
    """Evaluate all possible cuts with the orders of ``candidate``; arguments and result as of :func:`anneal`."""
    cuts, stages = candidate.cuts, candidate.placement.shape[0]
    nodes = cuts[stages]
    cuts[:stages] = np.arange(stages)
    while True:
        cost_stages(graph, machine, candidate.placement, cuts, candidate.recompute, buffers.costs)
        step, _, value = evaluate_candidate(count, candidate, machine, buffers)
        if step >= 0 and value < best_value:
            best_value = value
            _copy_into(best, candidate)
        cut = stages - 1
        while cut > 0 and cuts[cut] == nodes - (stages - cut):
            cut -= 1
        if cut == 0:
            return best_value
        cuts[cut] += 1
        for later in range(cut + 1, stages):
            cuts[later] = cuts[later - 1] + 1


@njit()
def _copy_into(best: Any, candidate: Any) -> None:
    """Copy everything that moves change."""
    best.placement[:] = candidate.placement
    best.cuts[:] = candidate.cuts
    best.recompute[:] = candidate.recompute
    best.orders[:] = candidate.orders
    best.lengths[:] = candidate.lengths
