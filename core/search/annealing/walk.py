"""One start of a search, and how far it has come."""

from collections.abc import Callable, Iterator
from math import comb
from typing import Any

import numpy as np
from attrs import define, evolve, field

from ...actions import Action
from ...costs.partition import Cuts
from ...evaluate.coding import FORWARD, INFINITY, decode_orders, encode
from ...evaluate.compiled import make_scratch, make_stage_arrays
from ...schedules.problem import Schedule
from ..problem.meter import Meter
from ..problem.place import Buffers, Place, make_buffers
from ..problem.setting import Setting
from .anneal import anneal, every_cut, judge
from .join_backwards import join_split_backwards
from .moves import Ways

SLICE = 4_000_000
"""Actions that a slice of a walk may evaluate: some hundredths of a second, in which nothing can stop it."""


@define(eq=False)
class Walk:
    """A schedule on some cuts, and the best that was found from there.

    Args:
        setting: what it is for.
        schedule: the family's name with its parameters.
        chunks: stages a device.
        best: the best place so far.
        annealed: whether its order is another than the family's.
        recomputes: whether moves may have stages recompute or not.
        step_s, excess, value: of ``best`` (see :func:`~.anneal.judge`).
        peaks: bytes of ``best`` at each position.
    """

    setting: Setting
    schedule: str
    chunks: int
    best: Place
    annealed: bool = False
    recomputes: bool = False
    step_s: float = INFINITY
    excess: float = INFINITY
    value: float = INFINITY
    peaks: tuple[float, ...] = ()
    _buffers: Buffers | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """Of the best order: the family's, where the order is still as the family has it."""
        return f"auto({self.schedule})" if self.annealed else self.schedule

    @property
    def actions(self) -> int:
        """Compute actions in a step."""
        return int(self.best.lengths.sum())

    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The best compute order, per position."""
        return decode_orders(self.best.orders, self.best.lengths, len(self.best.placement), self.setting.microbatches)

    def go(self, meter: Meter, moves: int, seed: int, warmth: float, ways: Ways) -> "Walk":
        """Anneal from the best place for so many moves; the walk itself.

        Raises:
            Stopped: the meter says so; what was found by then is kept.
        """
        place, setting = self.best.copy(), self.setting
        done, each = 0, max(SLICE // max(self.actions, 1), 1)
        shifts = ways.cut + ways.recompute < 1
        while done < moves:
            now = min(each, moves - done)
            before, buffers = self.value, self._working(place)
            self.value = anneal(
                seed + done, now, done / moves, (done + now) / moves, warmth, ways, setting.bound_s,
                setting.microbatches, setting.arrays, setting.machine, place, self.best, self.value, buffers,
            )  # fmt: skip
            done += now
            if self.value < before:
                self.annealed |= shifts and before < INFINITY
                self.judge()
            meter.spend(now, self.step_s if self.excess == 0 else INFINITY)
        return self

    def try_every_cut(self, meter: Meter) -> None:
        """Find the best cuts of all for the best order.

        Raises:
            Stopped: the meter says so; what was found is kept.
        """
        place, setting = self.best.copy(), self.setting
        self.value = every_cut(
            setting.microbatches, setting.arrays, setting.machine, place, self.best, self.value, self._working(place)
        )
        self.judge()
        meter.spend(self.cut_count, self.step_s if self.excess == 0 else INFINITY)

    @property
    def cut_count(self) -> int:
        """How many cuts there are."""
        return comb(len(self.setting.graph.nodes) - 1, len(self.best.placement) - 1)

    def judge(self) -> None:
        """What the best place gives."""
        buffers, setting = self._working(self.best), self.setting
        self.step_s, self.excess, self.value = judge(setting.microbatches, self.best, setting.machine, buffers)
        self.peaks = tuple(buffers.peaks.tolist())

    def _working(self, place: Place) -> Buffers:
        """A buffers with the costs of the place's stages."""
        setting, stages = self.setting, len(place.placement)
        if self._buffers is None:
            scratch = make_scratch(stages, setting.microbatches, setting.devices)
            self._buffers = make_buffers(make_stage_arrays(stages, setting.edges(stages)), scratch, place)
        setting.fill(place, self._buffers.costs)
        return self._buffers

    def tidy(self) -> None:
        """Join halves of backwards that stand next to each other, where that is no slower."""
        join_split_backwards(self.setting, self.best, self._working(self.best))
        self.judge()

    def again(self) -> "Walk":
        """A walk of its own from the best place."""
        return evolve(self, best=self.best.copy())

    def recomputing(self) -> "Walk":
        """A walk from the best place, where every device that holds too much recomputes as few stages as it must.

        Those first that save most for their time; all of a device's stages where nothing helps.
        """
        other = self.again()
        place, devices = other.best, range(self.setting.devices)
        costs = other._working(place).costs
        gains = costs.after_forward / np.maximum(costs.times[FORWARD], 1e-300)
        stages_on = [np.flatnonzero(place.placement == device) for device in devices]
        queues = [list(stages[np.argsort(-gains[stages], kind="stable")]) for stages in stages_on]
        short = [device for device in devices if other.peaks[device] > self.setting.limits[device]]
        while any(queues[device] for device in short):
            for device in short:
                if queues[device]:
                    place.recompute[queues[device].pop(0)] = True
            other.judge()
            short = [device for device in devices if other.peaks[device] > self.setting.limits[device]]
        return other

    def rest(self) -> None:
        """Give back what only walking needs."""
        self._buffers = None


def start_walk(setting: Setting, schedule: Schedule, cuts: Cuts, *, split: bool) -> Walk:
    """A walk that begins with a family's order on some cuts."""
    stages = len(schedule.placement)
    orders, lengths = encode(
        schedule.device_actions, stages, setting.microbatches, split=range(stages) if split else ()
    )
    place = Place(
        np.array(schedule.placement, dtype=np.int64), np.array(cuts, dtype=np.int64), np.zeros(stages, dtype=np.bool_),
        orders, lengths,
    )  # fmt: skip
    return Walk(setting, schedule.name, stages // setting.devices, place)


def varied(walks: list[Walk], most: int, each: int, key: Callable[[Walk], Any] = lambda walk: walk.value) -> list[Walk]:
    """The best walks by ``key``, best first: at most ``each`` of those with the same placement in the same setting."""
    kept: list[Walk] = []
    counts: dict[tuple[int, bytes], int] = {}
    for walk in sorted(walks, key=key):
        alike = id(walk.setting), walk.best.placement.tobytes()
        counts[alike] = counts.get(alike, 0) + 1
        if counts[alike] <= each and len(kept) < most:
            kept.append(walk)
    return kept


def ranked(walks: list[Walk]) -> list[Walk]:
    """Best first."""
    return sorted(walks, key=lambda walk: walk.value)


def frontier(walks: list[Walk]) -> Iterator[Walk]:
    """Of walks that fit, fastest first, those that hold less on the fullest device than every faster one."""
    least = INFINITY
    for walk in ranked([walk for walk in walks if walk.excess == 0]):
        most = max(walk.peaks)
        if most < least:
            least = most
            yield walk
