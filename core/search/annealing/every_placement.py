"""Every placement of a small graph's operators on devices: starts that single moves of operators rarely reach.

A good order for one placement is often a poor one for its neighbours, so annealing rejects the move to a neighbour
before the order is adapted. Where the placements can be enumerated, each whose lower bound is below the best step gets
an order of its own from beam searches, which also prove of most that none is faster. Few of some thousand placements
have such a bound.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from attrs import define, evolve

from ...evaluate.coding import INFINITY, Floats, Integers
from ...evaluate.compiled import make_stage_arrays
from ...schedules.meaning import PLACED
from ..beam.beam_orders import BeamSearch
from ..beam.placement_bound import placement_bounds
from ..problem.arrays import SAVED, STATE
from ..problem.candidate import Candidate
from ..problem.meter import Meter
from ..problem.setting import Setting
from .moves import MoveShares
from .walk import Walk

ENUMERATED = 20_000
"""Largest number of assignments of operators to devices that are enumerated."""
BEAMS = ((300, 10, 0.15), (60, 20, 0.2), (20, 80, 0.25), (6, 320, 0.25), (2, 1280, 0.15))
"""Rounds of beam searches for orders: number of placements, width of the beams, and share of the evaluations."""
GAIN = 0.0005
"""Share of the best step by which an order has to be faster."""
WAY = 1.25
"""Cost of a way that a beam search continues, in evaluations."""
ANNEALINGS = ((8, 0.4, 0.003), (3, 0.6, 0.01))
"""Rounds of moves of single actions, for what is left of the evaluations: number of placements, share, and initial
temperature."""
SHORT = 3.0
"""Multiple of the temperature where memory is short: most moves then exceed it, and good orders are far apart."""


def few_placements(setting: Setting) -> bool:
    """Whether the placements of the setting's operators can be enumerated."""
    return bool(setting.devices ** len(setting.graph.nodes) <= ENUMERATED)


def on_every_placement(walks: Sequence[Walk], meter: Meter, seed: int) -> list[Walk]:
    """Walks on all placements that may be faster than the given ones, by successive halving.

    A placement takes no further part once its lower bound is not below the best step, or a beam search has proved that
    no order is faster. What is left is annealed.

    Args:
        walks: of one setting, with one stage for each operator, evaluated; they take part, too.
        meter: the rounds spend what is left of its budget, or less if no placement can be faster.
        seed: of the random numbers of annealing.

    Raises:
        Stopped: the time limit is reached.
    """
    best_s = min((walk.step_s for walk in walks if walk.excess == 0), default=INFINITY)
    starts = _starts(walks, best_s)
    left = meter.left
    for keep, width, share in BEAMS:
        _search_beams(starts, keep, width, int(share * left), meter)
    left = meter.left
    for number, (keep, share, temperature) in enumerate(ANNEALINGS):
        for start, allowance, place in _taking_part(starts, keep, int(share * left)):
            moves, high = min(max(allowance, 1), meter.left), temperature * (SHORT if start.is_short else 1.0)
            start.walk.anneal(meter, moves, (seed * 101 + number) * 100_003 + place, high, MoveShares(0.0))
            start.walk.free_buffers()
    return [start.walk for start in starts if start.walk.value < INFINITY]


def _search_beams(starts: Sequence["_Start"], keep: int, width: int, allowance: int, meter: Meter) -> None:
    """One round of beam searches, on the placements on which the round before came closest to an order."""
    best_s = min(start.fitting_s for start in starts)
    open_starts = [start for start in starts if start.bound_s < best_s * (1 - GAIN)]
    for start in sorted(open_starts, key=lambda start: (-start.depth, start.fitting_s, start.bound_s))[:keep]:
        if start.bound_s < best_s * (1 - GAIN) and allowance > 0:
            states = start.search_beam(width, int(allowance / WAY), best_s * (1 - GAIN))
            best_s = min(best_s, start.fitting_s)
            allowance -= int(WAY * states)
            meter.spend(int(WAY * states), start.fitting_s)


@define(eq=False)
class _Start:
    """A placement with the fastest order so far.

    Args:
        walk: on the placement.
        bound_s: a lower bound of its step.
        depth: largest number of actions in a row that a beam search found possible in less than the best step.
    """

    walk: Walk
    bound_s: float
    depth: int = 0

    @property
    def fitting_s(self) -> float:
        """The step; infinite if there is no order that fits."""
        return self.walk.step_s if self.walk.excess == 0 else INFINITY

    @property
    def is_short(self) -> bool:
        """Whether a device cannot hold all microbatches at once."""
        setting, placement = self.walk.setting, self.walk.best.placement
        held = np.diff(setting.arrays.sums[0], axis=1)
        sizes = held[STATE] + setting.microbatches * held[SAVED]
        return bool(np.any(np.bincount(placement, sizes, setting.devices) > setting.limits))

    def search_beam(self, width: int, most: int, stop_s: float) -> int:
        """Search for an order that ends before ``stop_s``; return the number of ways that were continued.

        Args:
            width: of the beam.
            most: ways to continue.
            stop_s: end of orders that are too slow.
        """
        setting, best = self.walk.setting, self.walk.best
        stages = len(best.placement)
        costs = make_stage_arrays(stages, setting.edges(stages))
        setting.fill(best, costs)
        orders, lengths = best.orders.copy(), best.lengths.copy()
        search = BeamSearch(setting.microbatches, best.placement, costs, np.array(setting.limits))
        found = search.fill_fastest(width, most, stop_s, orders, lengths)
        self.depth = max(self.depth, found.depth)
        if found.complete:
            self.bound_s = max(self.bound_s, min(found.end_s, stop_s))
        if found.end_s < INFINITY:
            other = evolve(self.walk, best=best._replace(orders=orders, lengths=lengths), annealed=True)
            other.evaluate()
            other.free_buffers()
            if other.value < self.walk.value:
                self.walk = other
        return found.states


def _taking_part(starts: Sequence[_Start], keep: int, allowance: int) -> Iterator[tuple[_Start, int, int]]:
    """The starts of a round: the best that may become faster than all, each with its evaluations and its number."""
    best = min(starts, key=lambda start: start.walk.value)
    stop_s = best.fitting_s * (1 - GAIN)
    open_starts = [start for start in starts if start.bound_s < stop_s and start.walk.value < INFINITY]
    chosen = sorted(open_starts, key=lambda start: (start.walk.value, start.bound_s))[:keep]
    for place, start in enumerate(chosen):
        if start.bound_s < (1 - GAIN) * min(each.fitting_s for each in (best, *chosen)):
            yield start, allowance // len(chosen), place


def _starts(walks: Sequence[Walk], step_s: float) -> list[_Start]:
    """The best given walk on each placement, and other placements with lower bounds below ``step_s``, without an
    order."""
    setting, like = walks[0].setting, walks[0].best
    placements, alike = _placements(setting), _alike(setting)
    bounds: Floats = placement_bounds(setting, like, placements)
    order = np.argsort(bounds, kind="stable")[: BEAMS[0][0]]
    known = dict[bytes, _Start]()
    for walk in sorted(walks, key=lambda walk: walk.value):
        own = walk.best.placement
        (bound_s,) = placement_bounds(setting, like, own[np.newaxis])
        known.setdefault((_renumbered(own) if alike else own).tobytes(), _Start(walk, float(bound_s)))
    for placement, bound_s in zip(placements[order], bounds[order], strict=True):
        if bound_s < step_s and placement.tobytes() not in known:
            orders, lengths = np.zeros_like(like.orders), np.zeros_like(like.lengths)
            candidate = Candidate(placement.copy(), like.cuts.copy(), like.recompute.copy(), orders, lengths)
            walk = Walk(setting, PLACED, walks[0].chunks, candidate, annealed=True, recomputes=walks[0].recomputes)
            known[placement.tobytes()] = _Start(walk, float(bound_s))
    return list(known.values())


def _renumbered(placement: Integers) -> Integers:
    """The placement with devices numbered by their first use."""
    devices, first, inverse = np.unique(placement, return_index=True, return_inverse=True)
    numbers = np.empty(len(devices), dtype=np.int64)
    numbers[np.argsort(first)] = np.arange(len(devices))
    return np.asarray(numbers[inverse.reshape(-1)])


def _placements(setting: Setting) -> Integers:
    """All placements that use every device, (placements, operators); equal devices are numbered by their first use."""
    nodes, devices = len(setting.graph.nodes), setting.devices
    placements = np.indices((devices,) * nodes).reshape(nodes, -1).T
    if _alike(setting):
        placements = placements[_canonical(placements)]
    used = np.stack([(placements == device).any(axis=1) for device in range(devices)])
    return np.ascontiguousarray(placements[used.all(axis=0)], dtype=np.int64)


def _alike(setting: Setting) -> bool:
    """Whether the devices can be exchanged for each other."""
    machine, off = setting.machine, ~np.eye(setting.devices, dtype=np.bool_)
    over_replicas = (*machine.reduce, *machine.scatter, *machine.gather)
    tables: tuple[Floats, ...] = (machine.latency[off], machine.rate[off], machine.limits, *over_replicas)
    return len(set(setting.slowest)) == 1 and all(len(np.unique(table)) <= 1 for table in tables)


def _canonical(placements: Integers) -> "np.ndarray":
    """Which placements use the devices in ascending order."""
    highest = np.maximum.accumulate(placements, axis=1)
    first = placements[:, 0] == 0
    return np.asarray(first & (np.diff(highest, axis=1) <= 1).all(axis=1))
