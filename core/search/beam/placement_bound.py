"""A lower bound of the step on a placement of single operators: which placements are worth a search for their order.

All operators of a microbatch run one after another along the longest path, so an operator's forward cannot start before
its head, and its input gradient is followed by its tail, whatever the orders are. See :func:`_bound`.
"""

from typing import Any

import numpy as np

from ...evaluate.coding import FORWARD, INFINITY, INPUT, WEIGHT, Floats, Integers
from ...evaluate.compiled import END, START, make_stage_arrays
from ...numba_cache import njit
from ..problem.candidate import Candidate
from ..problem.costing import cost_stages
from ..problem.setting import Setting

ROUNDING = 1e-9
"""Share by which memory may seem too small."""


def placement_bounds(setting: Setting, like: Candidate, placements: Integers) -> Floats:
    """A lower bound of the step of every order on each placement; infinite if one microbatch does not fit on it.

    Args:
        setting: without fixed stages.
        like: with one stage for each operator; its recomputation applies to all placements.
        placements: device of every operator, (placements, operators).
    """
    stages = placements.shape[1]
    costs, cuts = make_stage_arrays(stages, setting.edges(stages)), np.arange(stages + 1)
    bounds = np.empty(len(placements))
    _fill_bounds(setting.microbatches, setting.arrays, setting.machine, placements, cuts, like.recompute, costs, bounds)
    return bounds


@njit()
def _fill_bounds(
    count: int, graph: Any, machine: Any, placements: Any, cuts: Any, recompute: Any, costs: Any, bounds: Any
) -> None:
    for i in range(placements.shape[0]):
        cost_stages(graph, machine, placements[i], cuts, recompute, costs)
        bounds[i] = _bound(count, placements[i], costs, machine.limits)


@njit()
def heads_of(costs: Any) -> Any:
    """Earliest start of F and of I of the first microbatch on every stage, (2, stages)."""
    times, stages = costs.times, costs.times.shape[1]
    heads = np.zeros((2, stages))
    for s in range(stages):
        for e in range(costs.forward_first[s], costs.forward_first[s + 1]):
            source = costs.forward_from[e]
            heads[FORWARD, s] = max(
                heads[FORWARD, s], heads[FORWARD, source] + times[FORWARD, source] + costs.forward_delay[e]
            )
    for s in range(stages - 1, -1, -1):  # gradients are sent to lower stages
        heads[INPUT, s] = heads[FORWARD, s] + times[FORWARD, s] + costs.second_forward[s]
        for e in range(costs.back_first[s], costs.back_first[s + 1]):
            source = costs.back_from[e]
            heads[INPUT, s] = max(heads[INPUT, s], heads[INPUT, source] + times[INPUT, source] + costs.back_delay[e])
    return heads


@njit()
def tails_of(costs: Any, after: Any) -> Any:
    """Time from the start of F, I and W of every stage to the end of all that follows, (3, stages).

    Args:
        costs: :class:`StageArrays`.
        after: time that follows the last W of a stage on its device, (stages).
    """
    times, stages = costs.times, costs.times.shape[1]
    tails = np.zeros((3, stages))
    tails[WEIGHT] = times[WEIGHT] + after
    tails[INPUT] = tails[WEIGHT]
    for s in range(stages):
        tails[INPUT, s] += times[INPUT, s]
        for t in range(s):
            for e in range(costs.back_first[t], costs.back_first[t + 1]):
                if costs.back_from[e] == s:
                    later = times[INPUT, s] + costs.back_delay[e] + tails[INPUT, t]
                    tails[INPUT, s] = max(tails[INPUT, s], later)
    tails[FORWARD] = times[FORWARD] + costs.second_forward + tails[INPUT]
    for s in range(stages - 1, -1, -1):
        for t in range(s + 1, stages):
            for e in range(costs.forward_first[t], costs.forward_first[t + 1]):
                if costs.forward_from[e] == s:
                    later = times[FORWARD, s] + costs.forward_delay[e] + tails[FORWARD, t]
                    tails[FORWARD, s] = max(tails[FORWARD, s], later)
    return tails


@njit()
def _turn(first: int, costs: Any) -> float:
    """The least time from the start of F of a stage to the end of its I."""
    times, stages = costs.times, costs.times.shape[1]
    start = np.full(stages, -INFINITY)
    start[first] = 0.0
    for s in range(first + 1, stages):
        for e in range(costs.forward_first[s], costs.forward_first[s + 1]):
            source = costs.forward_from[e]
            start[s] = max(start[s], start[source] + times[FORWARD, source] + costs.forward_delay[e])
    for s in range(stages - 1, first - 1, -1):
        start[s] += times[FORWARD, s] + costs.second_forward[s]
        for e in range(costs.back_first[s], costs.back_first[s + 1]):
            source = costs.back_from[e]
            start[s] = max(start[s], start[source] + times[INPUT, source] + costs.back_delay[e])
    return float(start[first] + times[INPUT, first])


@njit()
def _bound(count: int, placement: Any, costs: Any, limits: Any) -> float:
    """The largest, over the devices, of

    - head, work and tail: until the first gradient arrives a device runs forwards alone, after its last I W
      alone, each of no more microbatches than its memory holds; in between it runs the rest of its work;
    - turns: where memory holds k microbatches between F and I of a stage, the F of microbatch k waits for the first I;
    - memory: a stage holds each microbatch for its turn and its W at least; bytes times seconds have to fit.
    """
    times, stages, devices = costs.times, placement.shape[0], limits.shape[0]
    ends, after = np.zeros(devices), np.empty(stages)
    for s in range(stages):
        ends[placement[s]] += costs.optimizer[s]
    for s in range(stages):
        after[s] = ends[placement[s]]
    heads, tails, nested = heads_of(costs), tails_of(costs, after), is_chain(costs)
    bound = float(tails[FORWARD].max())
    for d in range(devices):
        room, work, saved, largest = limits[d], 0.0, 0.0, 0.0
        head, arrival, drain = INFINITY, INFINITY, INFINITY
        for s in range(stages):
            if placement[s] == d:
                room -= costs.state[s]
                work += times[FORWARD, s] + costs.second_forward[s] + times[INPUT, s] + times[WEIGHT, s]
                saved += _held(costs, s)
                largest = max(largest, costs.workspace[s])
                head, arrival = min(head, heads[FORWARD, s]), min(arrival, heads[INPUT, s])
                drain = min(drain, tails[INPUT, s] - times[INPUT, s])
        if head == INFINITY:
            continue
        short = count * saved + largest > room
        forwards, weights, held, area = 0.0, 0.0, 0.0, 0.0
        for s in range(stages):
            if placement[s] != d:
                continue
            own, left = _held(costs, s), (room - costs.workspace[s]) * (1 + ROUNDING)
            held = held + own if nested else own
            if held > left:
                return INFINITY
            most = float(count)
            if short and held > 0:
                turn = _turn(s, costs)
                area += count * own * (turn + times[WEIGHT, s])
                most = min(most, np.floor(left / own)) if own > 0 else most
                waits = np.ceil(count / np.floor(left / held)) - 1
                bound = max(bound, heads[FORWARD, s] + waits * turn + tails[FORWARD, s])
            forwards += most * times[FORWARD, s]
            weights += most * times[WEIGHT, s]
        before = min(forwards, arrival - head)
        bound = max(bound, arrival + count * work - before - weights + max(drain, weights + ends[d]))
        if area > 0:
            bound = max(bound, head + area / room + ends[d])
    return bound


@njit()
def is_chain(costs: Any) -> bool:
    """Whether each stage reads the one before it, and gets its gradient: then the times between F and I are nested."""
    for s in range(1, costs.times.shape[1]):
        reads, returns = False, False
        for e in range(costs.forward_first[s], costs.forward_first[s + 1]):
            reads |= costs.forward_from[e] == s - 1
        for e in range(costs.back_first[s - 1], costs.back_first[s]):
            returns |= costs.back_from[e] == s
        if not (reads and returns):
            return False
    return True


@njit(inline="always")
def _held(costs: Any, stage: int) -> float:
    """Bytes that a microbatch holds from its F to its W at least."""
    return float(min(costs.saved[START, FORWARD, stage], -costs.saved[END, WEIGHT, stage]))
