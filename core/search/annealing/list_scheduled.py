"""List-scheduled orders for the given costs and memory limits, as starts of the search.

They are better starts if published orders need too much memory, or assume stages of equal cost. A device runs the
available action that is due first in a periodic pattern, and starts none that it could not finish within its memory
(`schedules/construction/decode`). If one microbatch at a time fits, such an order exists.
"""

from collections.abc import Iterator

import numpy as np
from attrs import frozen

from ...costs.partition import Cuts
from ...evaluate.coding import BOTH, INPUT, WEIGHT, Floats, Integers
from ...evaluate.compiled import StageArrays, make_stage_arrays
from ...plan.derive import Recompute, recomputed_stages
from ...schedules.construction.decode import decode
from ...schedules.construction.instance import Instance
from ...schedules.meaning import LISTED
from ...schedules.problem import Schedule, ScheduleProblem
from ..orders.initial_keys import patterns, placements
from ..problem.candidate import Candidate
from ..problem.setting import Setting
from .even_cuts import balanced_cuts, even_cuts
from .fitting_cuts import fitting_cuts

KEPT = 2
"""Largest number of orders that become starts, for each cuts."""
HELD = 2
"""Memory limit of the list scheduler in microbatches per device of the pipeline: more makes no order faster."""
FLIGHTS = 3
"""Largest number of cuts that fit, each for another number of microbatches in flight."""


@frozen
class ListScheduled:
    """An order with its stages.

    Args:
        schedule: placement and order.
        cuts: of the stages.
        recompute: per stage.
    """

    schedule: Schedule
    cuts: Cuts
    recompute: "np.ndarray"


def list_scheduled(setting: Setting, chunks: int, recompute: Recompute | None, orders: int) -> Iterator[ListScheduled]:
    """Orders with ``chunks`` stages per device, on every placement, for several cuts.

    Args:
        setting: the graph and the devices.
        chunks: stages per device.
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
        even = even_cuts(setting, placement)
        self._cuts = [even]
        if setting.fixed is None and len(placement) > setting.devices:
            self._cuts.append(balanced_cuts(setting, self._placement, even))
        self.short = any(map(self._is_short, self._cuts))
        if self.short and setting.fixed is None:
            self._cuts += self._lean_cuts()

    def list_scheduled(self, orders: int) -> Iterator[ListScheduled]:
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

    def _is_short(self, cuts: Cuts) -> bool:
        """Whether a device's memory is too small for as many microbatches as 1F1B holds."""
        costs = self._costs(cuts)
        flight = min(self._setting.devices, self._setting.microbatches)
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

    def _scheduled_on(self, cuts: Cuts, orders: int) -> Iterator[ListScheduled]:
        task = self._instance(cuts)
        if np.any(task.saved[task.stages_on].sum(axis=1) > task.limits):
            return
        count = self._setting.microbatches
        found: list[tuple[float, int, Integers, Integers]] = []
        for number, state in enumerate(patterns(task, orders)):
            coded = np.zeros((self._setting.devices, 3 * task.stages_on.shape[1] * count), dtype=np.int64)
            lengths = np.zeros(self._setting.devices, dtype=np.int64)
            value, _ = decode(task.scheduler_input(state.fused), state.priorities, coded, lengths)
            found.append((value, number, coded, lengths))
        for _, _, coded, lengths in sorted(found, key=lambda each: each[:2])[:KEPT]:
            yield ListScheduled(task.schedule(LISTED, coded, lengths), cuts, self._recompute)

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
