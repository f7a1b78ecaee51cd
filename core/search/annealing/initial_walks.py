"""The initial walks of a search: published schedules, and list-scheduled orders if memory is short.

List-scheduled orders are better starts if published orders need too much memory, or assume stages of equal cost. A
device runs the available action that is due first in a periodic pattern, and starts none that it could not finish
within its memory (`schedules/construction/list_scheduler`). If one microbatch at a time fits, such an order exists.

Starts have even cuts, and cuts that fit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...costs.partition import Cuts
from ...policies.recompute import Recompute, recomputed_stages
from ...schedules.construction.initial_keys import patterns, placements
from ...schedules.construction.list_scheduler import DECODING, Instance
from ...schedules.construction.periodic import periodic_starts
from ...schedules.meaning import LISTED, PERIODIC
from ...schedules.problem import ScheduleFamily, ScheduleProblem
from ...timing.coding import BOTH, INFINITY, INPUT, WEIGHT, Floats
from ...timing.compiled import StageArrays, make_stage_arrays
from ..problem.candidate import Candidate
from ..problem.setting import Setting
from ..search_options import SearchOptions
from .fitting_cuts import fitting_cuts, most_in_flight
from .walk import Walk, start_walk

BUILT = 250_000
"""Largest number of compute actions in the initial schedules, which are built in plain Python."""
LEAST_STARTS = 6
"""Number of schedules for each setting, whatever their size."""
USUAL = 4
"""Multiple of that number of actions up to which at least one schedule of every family is built."""
ENOUGH = 12
"""Schedules that fit. With fewer, because memory is short, list-scheduled orders are added."""
LISTED_SHARE = 0.1
"""Share of the evaluations for list-scheduled orders."""

PLACES = 4
"""Approximate number of pairs of placement and cuts for each number of stages per device."""
LEAST_LISTED = 4
"""Smallest number of list-scheduled orders for each of these pairs."""


class InitialWalks:
    """The initial walks of a search in some settings.

    Args:
        settings: to choose among.
        space: what the search may change.
    """

    def __init__(self, settings: Sequence[Setting], space: SearchOptions) -> None:
        self._settings, self._space = settings, space
        self._with_few: list[Setting] = []
        """Settings in which few published schedules fit, or too large ones for all to be built."""

    def published(self) -> Iterator[Walk]:
        """Evaluated walks for every setting, family, set of parameters and number of stages per device; not for all of
        them if schedules are large."""
        for setting in self._settings:
            yield from self._published(setting)

    def _published(self, setting: Setting) -> Iterator[Walk]:
        space = self._space
        seen: set[bytes] = set()
        problems: dict[tuple[int, ...], tuple[Cuts, ScheduleProblem]] = {}  # options share placements
        built = fitting = 0
        large, most = False, BUILT / len(self._settings)
        for count, (family, parameters, chunks) in enumerate(_candidates(setting, space)):
            least = LEAST_STARTS if built > USUAL * most else len(space.families)
            large = count >= least and built > most
            if large:
                break
            placement = family.placement(setting.devices, chunks)
            if placement not in problems:
                even = setting.even_cuts(placement)
                problems[placement] = even, problem_of(setting, placement, even)
            cuts, problem = problems[placement]
            schedule = family.built(problem, parameters)
            if schedule is None:
                continue
            walk = start_walk(setting, schedule, cuts, split=space.anneal and not setting.mixes)
            if walk.best.orders.tobytes() not in seen:
                seen.add(walk.best.orders.tobytes())
                walk.best.recompute[list(recomputed_stages(space.recompute or "none", len(placement)))] = True
                yield from _fitting(walk, space.recompute)
                built += walk.actions
                fitting += walk.excess == 0
        if seen and (large or fitting < min(ENOUGH, len(seen))):
            self._with_few.append(setting)

    def list_scheduled(self, budget: int) -> Iterator[Walk]:
        """Walks with list-scheduled orders, for settings with few published schedules; none if orders must be a
        family's. They cost a share of ``budget`` evaluations."""
        if self._space.anneal:
            for setting in self._with_few:
                yield from _list_scheduled(setting, self._space, int(LISTED_SHARE * budget / len(self._settings)))


def _list_scheduled(setting: Setting, space: SearchOptions, budget: int) -> Iterator[Walk]:
    """Walks that start with list-scheduled orders."""
    numbers = _chunk_numbers(setting, space)
    orders = max(int(budget / DECODING / (PLACES * len(numbers))), LEAST_LISTED)
    built = 0
    for chunks in numbers:
        for walk in list_scheduled(setting, chunks, space.recompute, orders):
            walk.recomputes = space.recompute is None and bool(walk.best.recompute.any())
            built += walk.actions
            yield walk
        if built > BUILT:
            break


def _chunk_numbers(setting: Setting, space: SearchOptions) -> range:
    fewest, most = space.chunks
    if setting.fixed is not None:
        fewest = most = len(setting.fixed.stages) // setting.devices
    return range(fewest, min(most, len(setting.graph.nodes) // setting.devices) + 1)


def _fitting(walk: Walk, recompute: Recompute | None) -> list[Walk]:
    """The walk, evaluated. If it exceeds a limit, it gets cuts that fit, and a second walk recomputes some stages."""
    walk.evaluate()
    found, short = [walk], recompute is None and walk.excess > 0
    if walk.excess > 0:
        if recompute is None:
            found.append(walk.recomputing())
        if walk.setting.fixed is None:
            _fit(walk)
    for each in found:
        each.recomputes = short
        each.value = INFINITY
        each.free_buffers()
    return found


def _fit(walk: Walk) -> None:
    """Replace the cuts by ones that fit, or that exceed the limits less."""
    setting, candidate = walk.setting, walk.best
    flight = most_in_flight(candidate.orders, candidate.lengths, len(candidate.placement), setting.microbatches)
    cuts, fit = fitting_cuts(setting, candidate.placement, flight, candidate.recompute)
    before, excess = candidate.cuts.copy(), walk.excess
    candidate.cuts[:] = cuts
    walk.evaluate()
    if not fit and walk.excess > excess:
        candidate.cuts[:] = before


def _candidates(setting: Setting, space: SearchOptions) -> Iterator[tuple[ScheduleFamily, Mapping[str, Any], int]]:
    """Families with parameters and a number of stages per device: each family's first set of parameters with its usual
    number of stages; then the first sets for the other numbers, from few stages to many; then the second sets, and so
    on."""
    found = [
        (number, number > 0 or chunks != family.usual_chunks, family, parameters, chunks)
        for chunks in _chunk_numbers(setting, space)
        for family in space.families
        for number, parameters in enumerate(
            family.candidates_of(ScheduleProblem(setting.devices, setting.microbatches, chunks))
        )
    ]
    return (each[2:] for each in sorted(found, key=lambda each: each[:2]))


def problem_of(setting: Setting, placement: Sequence[int], cuts: Cuts) -> ScheduleProblem:
    """The input of a schedule's builder, with the costs of the stages of these cuts.

    The hop delay is the mean over the edges between devices. The memory for saved tensors is the smallest over devices
    of limit − state − largest workspace.
    """
    _, costs, edges = setting.staged(cuts, placement)
    places = [setting.replicas[0][device] for device in placement]
    hops = [
        setting.cluster.transfer_s(places[edge.src], places[edge.dst], edge.bytes)
        for edge in edges
        if places[edge.src] != places[edge.dst]
    ]
    spare = []
    for device, limit in enumerate(setting.limits):
        own = [cost for cost, place in zip(costs, placement, strict=True) if place == device]
        spare.append(limit - sum(c.state_bytes for c in own) - max((c.workspace_bytes for c in own), default=0))
    return ScheduleProblem(
        setting.devices, setting.microbatches, len(costs) // setting.devices, tuple(costs),
        sum(hops) / len(hops) if hops else 0.0, max(min(spare), 0.0),
    )  # fmt: skip


PERIODIC_BELOW = 0.6
"""Periodic orders are starts up to this share of the memory of 1F1B."""
KEPT = 2
"""Largest number of orders that become starts, for each cuts."""
HELD = 2
"""Memory limit of the list scheduler in microbatches per device of the pipeline: more makes no order faster."""
FLIGHTS = 3
"""Largest number of cuts that fit, each for another number of microbatches in flight."""


def list_scheduled(setting: Setting, chunks: int, recompute: Recompute | None, orders: int) -> Iterator[Walk]:
    """Walks with ``chunks`` stages per device, on every placement, for several cuts.

    Args:
        recompute: see ``SearchOptions``.
        orders: how many to try for each placement and cuts; the best ``KEPT`` are returned.
    """
    for placement in placements(setting.devices, chunks):
        recomputes = np.zeros(len(placement), dtype=np.bool_)
        recomputes[list(recomputed_stages(recompute or "none", len(placement)))] = True
        stages = _Stages(setting, placement, recomputes)
        yield from stages.list_scheduled(orders)
        if recompute is None and stages.short:
            yield from _Stages(setting, placement, ~recomputes).list_scheduled(orders)


class _Stages:
    """Several cuts for the stages of one placement, and the orders for them.

    Args:
        setting: the graph and the devices.
        placement: device of every stage.
        recompute: per stage.
    """

    def __init__(self, setting: Setting, placement: tuple[int, ...], recompute: "np.ndarray") -> None:
        self._setting, self._placement, self._recompute = setting, np.array(placement, dtype=np.int64), recompute
        self._on = np.array([[s for s, d in enumerate(placement) if d == at] for at in range(setting.devices)])
        self._cuts = [setting.even_cuts(placement)]
        self.short = self._is_short(self._cuts[0])
        if self.short and setting.fixed is None:
            self._cuts += self._lean_cuts()

    def list_scheduled(self, orders: int) -> Iterator[Walk]:
        """The best ``KEPT`` orders for each cuts."""
        for cuts in dict.fromkeys(self._cuts):
            yield from self._scheduled_on(cuts, orders)

    def _costs(self, cuts: Cuts) -> StageArrays:
        stages = len(self._placement)
        costs, none = make_stage_arrays(stages, self._setting.edges(stages)), np.zeros(0, dtype=np.int64)
        self._setting.fill(Candidate(self._placement, np.array(cuts), self._recompute, none, none), costs)
        return costs

    def _spare(self, costs: StageArrays) -> Floats:
        """Bytes for saved tensors, per device: the limit without state and workspace, which no order changes."""
        state, workspace = (
            costs.state[self._on].sum(axis=1),
            (costs.workspace + costs.second_forward_bytes)[self._on].max(axis=1),
        )
        return np.asarray(self._setting.machine.limits - state - workspace, dtype=float)

    def _is_short(self, cuts: Cuts, share: float = 1.0) -> bool:
        """Whether a device's memory is too small for this share of the microbatches that 1F1B holds."""
        costs = self._costs(cuts)
        flight = share * min(self._setting.devices, self._setting.microbatches) * (1 - 1e-6)
        return bool(np.any(flight * costs.after_forward[self._on].sum(axis=1) > self._spare(costs)))

    def _lean_cuts(self) -> Iterator[Cuts]:
        """Cuts that fit with all microbatches of 1F1B in flight, half of them, and so on, and finally with one."""
        setting, found = self._setting, 0
        flight = min(setting.devices, setting.microbatches)
        one_each = len(self._placement) == setting.devices
        ahead = setting.devices - self._placement if one_each else np.full(len(self._placement), flight)
        while flight and found < FLIGHTS:
            cuts, fit = fitting_cuts(setting, self._placement, np.minimum(ahead, flight), self._recompute)
            if fit or flight == 1:
                found += 1
                yield cuts
            flight = min(flight - 1, 1) if found == FLIGHTS - 1 else flight // 2

    def _scheduled_on(self, cuts: Cuts, orders: int) -> Iterator[Walk]:
        task, short = self._instance(cuts), self._is_short(cuts, PERIODIC_BELOW)
        if np.any(task.saved[task.stages_on].sum(axis=1) > task.limits):
            return
        found = sorted(map(task.listed, patterns(task, orders)), key=lambda listed: listed.value[0])
        periodic = [(each.orders, each.lengths) for each in periodic_starts(task)] if short else []
        orders_of = {LISTED: [listed[1:] for listed in found[:KEPT]], PERIODIC: periodic}
        for name, coded in ((name, coded) for name, own in orders_of.items() for coded in own):
            schedule = task.schedule(name, *coded)
            walk = start_walk(self._setting, schedule, cuts, split=not self._setting.mixes)
            walk.annealed, walk.best.recompute[:] = True, self._recompute
            yield walk

    def _instance(self, cuts: Cuts) -> Instance:
        """The input of the list scheduler, which has no messages that skip stages; later moves consider them."""
        setting, costs = self._setting, self._costs(cuts)
        times = costs.times[: WEIGHT + 1].copy()
        times[INPUT] += costs.second_forward
        hops = np.zeros(len(self._placement))
        for stage in range(1, len(hops)):
            for edge in range(costs.forward_first[stage], costs.forward_first[stage + 1]):
                if costs.forward_from[edge] == stage - 1:
                    hops[stage] = costs.forward_delay[edge]
        used = costs.after_forward[self._on].sum(axis=1)
        enough = HELD * setting.devices * used
        problem = ScheduleProblem(
            setting.devices, setting.microbatches, len(hops) // setting.devices, hop_s=float(hops[1:].mean())
            if len(hops) > 1 else 0.0,
        )  # fmt: skip
        return Instance(
            problem, self._placement, self._on, times, costs.times[BOTH] + costs.second_forward, hops,
            costs.after_forward, costs.after_input, np.minimum(self._spare(costs), enough),
        )  # fmt: skip
