"""Cuts and orders annealed together on the costs that they really have: one compiled loop, deterministic for its seed.

A move shifts one action of a device's order (as `schedules/local` does: mostly one that the longest path runs
through), splits a backward or makes one whole again, moves cuts by some operators, or has a stage recompute or not.
Each is judged by the step that results, every device's memory and every edge included; going from one kind to the
other is what neither a partition for a given schedule nor a schedule for a given partition finds. Bytes above a limit
count as time, and as more than any move could gain, so that a start above its limits finds its way down first.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ..schedules.decode import FORWARD, INFINITY, INPUT, TAIL, WEIGHT, Floats, Integers
from ..schedules.local import some_move
from ..shortcut.path import BOTH, UNKNOWN, Room, StageArrays, count_whole, peak, run, work_of
from .costing import cost_stages

EXCESS = 10.0
"""Steps that it counts to hold as much above a device's limit as the limit itself."""
ABOVE = 1e6
"""Seconds that it counts to hold anything above a limit: more than any step, so that whatever fits comes first."""
STAGES, NOTHING = -1, -2
"""What a move can change beside the order of a device."""
NEAR = 1.5
"""Mean reach in operators of most moves of cuts; the others reach a quarter of a stage."""


class Place(NamedTuple):
    """A place in the search, changed in place.

    Args:
        placement: device of every stage.
        cuts: (stages + 1).
        recompute: per stage.
        orders, lengths: coded orders of every device, with room for all backwards split.
    """

    placement: Integers
    cuts: Integers
    recompute: "np.ndarray"
    orders: Integers
    lengths: Integers

    def copy(self) -> "Place":
        """A place of its own with the same values."""
        return Place(*(part.copy() for part in self))


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


class Bench(NamedTuple):
    """What a walk works with: made once for many.

    Args:
        costs: of the stages of the present place.
        room: for runs.
        work, peaks: per device: time of its actions, bytes at its peak.
        whole: per stage, how many of its backwards are not split.
        other_work, other_peaks, other_whole, row, lengths, cuts, recompute: what a move brings or has to take back.
        found: (actions, 2).
    """

    costs: StageArrays
    room: Room
    work: Floats
    peaks: Floats
    whole: Integers
    other_work: Floats
    other_peaks: Floats
    other_whole: Integers
    row: Integers
    lengths: Integers
    cuts: Integers
    recompute: "np.ndarray"
    found: Integers


def make_bench(costs: StageArrays, room: Room, place: Place) -> Bench:
    """A bench for places as large as this one."""
    devices, stages = len(place.lengths), len(place.placement)
    work, peaks, other_work, other_peaks = (np.zeros(devices) for _ in range(4))
    whole, other_whole = np.zeros((2, stages), dtype=np.int64)
    row, found = np.empty(place.orders.shape[1], dtype=np.int64), np.empty((place.orders.size, 2), dtype=np.int64)
    return Bench(
        costs, room, work, peaks, whole, other_work, other_peaks, other_whole, row, place.lengths.copy(),
        place.cuts.copy(), place.recompute.copy(), found,
    )  # fmt: skip


@njit(cache=True)
def excess_of(place: Any, machine: Any, costs: Any, stage_of: Any, peaks: Any) -> float:
    """Fill ``peaks`` with the bytes of every device; what they hold above their limits, as shares of these."""
    total = 0.0
    for d in range(place.orders.shape[0]):
        peaks[d] = peak(place.orders[d], place.lengths[d], d, place.placement, costs, stage_of)[0]
        total += max(peaks[d] - machine.limits[d], 0.0) / machine.limits[d]
    return total


@njit(cache=True)
def judge(count: int, place: Any, machine: Any, bench: Any) -> tuple[float, float, float]:
    """Step, excess and value of a place whose stages are costed; ``work`` and ``peaks`` are filled.

    The step is negative where the orders deadlock. The value is what annealing makes small.
    """
    count_whole(place.orders, place.lengths, bench.room.stage_of, bench.whole)
    work_of(count, place.placement, bench.costs, bench.whole, bench.work)
    excess = excess_of(place, machine, bench.costs, bench.room.stage_of, bench.peaks)
    step = run(place.orders, place.lengths, count, place.placement, bench.costs, bench.work, INFINITY, bench.room)
    return step, excess, _value(step, excess, bench.room)


@njit(cache=True)
def _value(step: float, excess: float, room: Any) -> float:
    return float(step * (1 + EXCESS * excess) + TAIL * room.free.mean() + (ABOVE if excess > 0 else 0.0))


@njit(cache=True)
def _shift(order: Any, start: int, goal: int, stage_of: Any) -> int:
    """Move the action at ``start`` towards ``goal``, as far as its own stage allows; returns where it is then."""
    code, i = order[start], start
    kind, stage = code & 3, stage_of[code >> 2]
    step = 1 if goal > start else -1
    while i != goal:
        other = order[i + step]
        if stage_of[other >> 2] == stage and (other >> 2 == code >> 2 or _ordered(kind, other & 3)):
            break
        order[i], order[i + step] = other, code
        i += step
    return i


@njit(cache=True, inline="always")
def _ordered(a: int, b: int) -> bool:
    """Whether a stage runs actions of these kinds in the order of the microbatches."""
    return a == b or (a == BOTH and b != FORWARD) or (b == BOTH and a != FORWARD)


@njit(cache=True)
def _critical(orders: Any, lengths: Any, placement: Any, room: Any, found: Any) -> int:
    """Positions on the longest path whose action waited for the one in front of it on its device, into ``found``."""
    d = int(np.argmax(room.free))
    number, i = 0, lengths[d] - 1
    while i >= 0:
        why = room.cause[orders[d, i]]
        if why != UNKNOWN:
            d = placement[room.stage_of[why >> 2]]
            i = room.where[why]
        else:
            if i > 0:
                found[number, 0], found[number, 1] = d, i
                number += 1
            i -= 1
    return number


@njit(cache=True)
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


@njit(cache=True)
def _move_cuts(cuts: Any) -> bool:
    """Move one cut, or a few that follow one another, by some nodes; whether that changes anything."""
    stages = cuts.shape[0] - 1
    if stages == 1:
        return False
    reach = max(cuts[stages] / stages / 4.0, 1.0) if np.random.random() < 0.3 else NEAR
    first, width = 1 + np.random.randint(stages - 1), 1
    while first + width < stages and np.random.random() < 0.4:
        width += 1
    by = 1 + int(-reach * np.log(1 - np.random.random()))
    if np.random.random() < 0.5:
        by = max(-by, cuts[first - 1] + 1 - cuts[first])
    else:
        by = min(by, cuts[first + width] - 1 - cuts[first + width - 1])
    for cut in range(first, first + width):
        cuts[cut] += by
    return bool(by != 0)


@njit(cache=True)
def _other_stages(
    count: int, enough: float, graph: Any, machine: Any, place: Any, bench: Any
) -> tuple[float, float, float]:  # fmt: skip
    """Step, excess and value of the place with the cuts and the recomputation it has now; infinite above ``enough``."""
    cost_stages(graph, machine, place.placement, place.cuts, place.recompute, bench.costs)
    bench.other_work[:] = bench.work
    work_of(count, place.placement, bench.costs, bench.whole, bench.work)
    if bench.work.max() > enough:
        return INFINITY, 0.0, INFINITY
    bench.other_peaks[:] = bench.peaks
    for s in range(place.placement.shape[0]):
        same = bench.cuts[s] == place.cuts[s] and bench.cuts[s + 1] == place.cuts[s + 1]
        if not same or place.recompute[s] or bench.recompute[s]:
            bench.other_peaks[place.placement[s]] = -1.0
    excess = 0.0
    for d in range(place.orders.shape[0]):
        if bench.other_peaks[d] < 0:
            most = peak(place.orders[d], place.lengths[d], d, place.placement, bench.costs, bench.room.stage_of)[0]
            bench.other_peaks[d] = most
        excess += max(bench.other_peaks[d] - machine.limits[d], 0.0) / machine.limits[d]
    step, value = _timed(count, enough, excess, place, bench)
    return step, excess, value


@njit(cache=True)
def _other_order(
    count: int, enough: float, excess: float, d: int, machine: Any, place: Any, bench: Any
) -> tuple[float, float, float]:  # fmt: skip
    """Step, excess and value of the place with the order that device ``d`` has now; infinite above ``enough``."""
    limit = machine.limits[d]
    most = peak(place.orders[d], place.lengths[d], d, place.placement, bench.costs, bench.room.stage_of)[0]
    bench.other_peaks[:] = bench.peaks
    bench.other_peaks[d] = most
    excess += (max(most - limit, 0.0) - max(bench.peaks[d] - limit, 0.0)) / limit
    excess = excess if excess > 1e-12 else 0.0
    step, value = _timed(count, enough, excess, place, bench)
    return step, excess, value


@njit(cache=True)
def _timed(count: int, enough: float, excess: float, place: Any, bench: Any) -> tuple[float, float]:
    stop = (enough - ABOVE if excess > 0 else enough) / (1 + EXCESS * excess)
    if bench.work.max() > stop:
        return INFINITY, INFINITY
    step = run(place.orders, place.lengths, count, place.placement, bench.costs, bench.work, stop, bench.room)
    if step < 0:
        return INFINITY, INFINITY
    return step, _value(step, excess, bench.room)


@njit(cache=True)
def anneal(
    seed: int, moves: int, begin: float, end: float, warmth: float, ways: Any, target: float, count: int, graph: Any,
    machine: Any, place: Any, best: Any, best_value: float, bench: Any,
) -> float:  # fmt: skip
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
        bench: :class:`Bench`, with costs of the stages of ``place``.

    Returns:
        The value of ``best``.
    """
    np.random.seed(seed)
    step, excess, value = judge(count, place, machine, bench)
    if step >= 0 and value < best_value:
        best_value = value
        _keep(place, best)
    scale = step
    number = _critical(place.orders, place.lengths, place.placement, bench.room, bench.found)
    for tried in range(1, moves):
        left = 1 - (begin + (end - begin) * tried / moves)
        enough = (value - warmth * scale * left * left * np.log(1 - np.random.random())) * (1 + 1e-12)
        what = _move(ways, number, place, bench)
        if what == NOTHING:
            continue
        if what == STAGES:
            new_step, new_excess, new_value = _other_stages(count, enough, graph, machine, place, bench)
        else:
            new_step, new_excess, new_value = _other_order(count, enough, excess, what, machine, place, bench)
        if new_value > enough:
            _take_back(what, graph, machine, place, bench)
            continue
        step, excess, value = new_step, new_excess, new_value
        bench.peaks[:] = bench.other_peaks
        number = _critical(place.orders, place.lengths, place.placement, bench.room, bench.found)
        if value < best_value:
            best_value = value
            _keep(place, best)
            if step <= target and excess == 0:
                break
    return best_value


@njit(cache=True)
def every_cut(
    count: int, graph: Any, machine: Any, place: Any, best: Any, best_value: float, bench: Any
) -> float:  # fmt: skip
    """Look at all cuts there are, for the orders of ``place``; arguments and result as of :func:`anneal`."""
    cuts, stages = place.cuts, place.placement.shape[0]
    nodes = cuts[stages]
    cuts[:stages] = np.arange(stages)
    while True:
        cost_stages(graph, machine, place.placement, cuts, place.recompute, bench.costs)
        step, _, value = judge(count, place, machine, bench)
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


@njit(cache=True)
def _move(ways: Any, number: int, place: Any, bench: Any) -> int:
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
    d, start, goal = some_move(place.lengths, bench.found, number)
    bench.row[:] = place.orders[d]
    return d if _shift(place.orders[d], start, goal, bench.room.stage_of) != start else NOTHING


@njit(cache=True)
def _take_back(what: int, graph: Any, machine: Any, place: Any, bench: Any) -> None:
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


@njit(cache=True)
def _keep(place: Any, best: Any) -> None:
    """Copy what a walk changes."""
    best.cuts[:] = place.cuts
    best.recompute[:] = place.recompute
    best.orders[:] = place.orders
    best.lengths[:] = place.lengths
