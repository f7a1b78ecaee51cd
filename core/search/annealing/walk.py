"""A walk: one start of the search, and the best candidate found from it."""

from collections import deque
from collections.abc import Callable, Iterator
from math import comb
from typing import Any

import numpy as np
from attrs import define, evolve, field

from ...actions import Action
from ...cluster.mesh import least_by_position
from ...costs.partition import Cuts
from ...schedules.construction.shifts import join
from ...schedules.problem import Schedule
from ...timing.coding import FORWARD, INFINITY, KINDS, decode_orders, encode
from ...timing.compiled import make_scratch, make_stage_arrays
from ..problem.candidate import Buffers, Candidate, make_buffers
from ..problem.meter import Meter
from ..problem.setting import Setting
from .anneal import anneal, evaluate_candidate, step_of, try_every_cut
from .moves import MoveShares

SLICE = 4_000_000
"""Actions evaluated without a check of the time limit: some hundredths of a second."""
CONTENDED = 50
"""Time of an evaluation with contention ÷ time of one without."""
ROUNDING = 1e-12
"""Share of the step by which a longer one counts as equal."""
JOINED = 15_000_000
"""Actions evaluated to find what is joined: some seconds. What is left then stays divided, and is no slower."""


@define(eq=False)
class Walk:
    """One start of the search: a schedule on some cuts, and the best candidate found from it.

    Args:
        setting: in which it is evaluated.
        schedule: the family's name with its parameters.
        best: the best candidate so far.
        offload: stages that the schedule offloads, each with the share of its bytes.
        annealed: whether its order differs from the family's.
        recomputes: whether moves may switch the recomputation of stages.
        step_s, excess, value: step, excess and objective of ``best`` (see :func:`~.anneal.evaluate_candidate`).
        peaks: bytes of ``best`` at each position.
    """

    setting: Setting
    schedule: str
    best: Candidate
    offload: tuple[tuple[int, float], ...] = ()
    annealed: bool = False
    recomputes: bool = False
    step_s: float = INFINITY
    excess: float = INFINITY
    value: float = INFINITY
    peaks: tuple[float, ...] = ()
    _buffers: Buffers | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """Name of the best order: the family's, or ``auto(…)`` if the order differs from the family's."""
        return f"auto({self.schedule})" if self.annealed else self.schedule

    @property
    def actions(self) -> int:
        """Compute actions in a step."""
        return int(self.best.lengths.sum())

    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The best compute order, per position."""
        return decode_orders(self.best.orders, self.best.lengths, len(self.best.placement), self.setting.microbatches)

    def anneal(self, meter: Meter, moves: int, seed: int, temperature: float, shares: MoveShares) -> "Walk":
        """Anneal from the best candidate; return the walk itself.

        Args:
            temperature: the initial one, as a share of the step.

        Raises:
            Stopped: the time limit is reached; the best candidate so far is kept.
        """
        candidate, setting = self.best.copy(), self.setting
        done, each = 0, max(SLICE // (max(self.actions, 1) * (CONTENDED if setting.contended else 1)), 1)
        shifts = shares.cut + shares.recompute < 1
        while done < moves:
            now = min(each, moves - done)
            before, buffers = self.value, self._buffers_for(candidate)
            self.value = anneal(
                seed + done, now, done / moves, (done + now) / moves, temperature, shares, setting.bound_s,
                setting.microbatches, setting.arrays, setting.machine, candidate, self.best, self.value, buffers,
            )  # fmt: skip
            done += now
            if self.value < before:
                self.annealed |= shifts and before < INFINITY
                self.evaluate()
            meter.spend(now, self.step_s if self.excess == 0 else INFINITY)
        return self

    def try_every_cut(self, meter: Meter) -> None:
        """Find the best of all possible cuts for the best order.

        Raises:
            Stopped: the time limit is reached; the best cuts are kept.
        """
        candidate, setting = self.best.copy(), self.setting
        self.value = try_every_cut(
            setting.microbatches,
            setting.arrays,
            setting.machine,
            candidate,
            self.best,
            self.value,
            self._buffers_for(candidate),
        )
        self.evaluate()
        meter.spend(self.cut_count, self.step_s if self.excess == 0 else INFINITY)

    @property
    def cut_count(self) -> int:
        """Number of possible cuts."""
        return comb(len(self.setting.graph.nodes) - 1, len(self.best.placement) - 1)

    def evaluate(self) -> None:
        """Compute step, excess, objective and peaks of the best candidate."""
        buffers, setting = self._buffers_for(self.best), self.setting
        self.step_s, self.excess, self.value = evaluate_candidate(
            setting.microbatches, self.best, setting.machine, buffers
        )
        self.peaks = tuple(buffers.peaks.tolist())

    def _buffers_for(self, candidate: Candidate) -> Buffers:
        """The buffers, with the costs of the candidate's stages."""
        setting, stages = self.setting, len(candidate.placement)
        if self._buffers is None:
            scratch = make_scratch(stages, setting.microbatches, setting.devices)
            self._buffers = make_buffers(make_stage_arrays(stages, setting.edges(stages)), scratch, candidate)
        setting.fill(candidate, self._buffers.costs)
        return self._buffers

    @property
    def may_fit(self) -> bool:
        """Whether its peaks, without messages, fit in the memory of every device."""
        memory = least_by_position(self.setting.memory, self.setting.replicas)
        return all(peak <= limit for peak, limit in zip(self.peaks, memory, strict=True))

    def join_backwards(self) -> None:
        """Join each I directly followed by its own W into a B, if that is not slower: of all stages; where that is
        slower, of each half of the stages, then of the microbatches."""
        setting, candidate, buffers = self.setting, self.best, self._buffers_for(self.best)
        count = setting.microbatches
        buffers.work[:] = 0.0  # only used to end a run early, which is not needed here

        def step() -> float:
            return float(step_of(count, INFINITY, candidate, setting.machine, buffers))

        each = max(int(candidate.lengths.sum()), 1) * (CONTENDED if setting.contended else 1)
        least, tries = step(), JOINED // each
        ranges = deque([(0, len(candidate.placement) * count)])  # of stage × count + microbatch
        while ranges and tries > 0:
            first, last = ranges.popleft()
            on = np.unique(candidate.placement[first // count : (last - 1) // count + 1])
            orders, lengths = candidate.orders[on], candidate.lengths[on]
            for device in on:
                order, length = candidate.orders[device], int(candidate.lengths[device])
                candidate.lengths[device] = join(order, length, KINDS * first, KINDS * last)
            if (candidate.lengths[on] == lengths).all():
                continue
            now, tries = step(), tries - 1
            if 0 <= now <= least * (1 + ROUNDING):
                least = min(least, now)
                continue
            candidate.orders[on], candidate.lengths[on] = orders, lengths
            if last - first > 1:
                unit = count if last - first > count else 1
                middle = first + (last - first) // unit // 2 * unit
                ranges += [(first, middle), (middle, last)]
        self.evaluate()
        self.free_buffers()

    def copy(self) -> "Walk":
        """An independent walk from the best candidate."""
        return evolve(self, best=self.best.copy())

    def recomputing(self) -> "Walk":
        """A copy in which every device that exceeds its limit recomputes as few of its stages as necessary.

        Stages with the most saved bytes per second of their forward come first. A device that exceeds its limit even
        then recomputes all its stages.
        """
        other = self.copy()
        candidate, devices = other.best, range(self.setting.devices)
        costs = other._buffers_for(candidate).costs
        gains = costs.after_forward / np.maximum(costs.times[FORWARD], 1e-300)
        stages_on = [np.flatnonzero(candidate.placement == device) for device in devices]
        queues = [list(stages[np.argsort(-gains[stages], kind="stable")]) for stages in stages_on]
        short = [device for device in devices if other.peaks[device] > self.setting.limits[device]]
        while any(queues[device] for device in short):
            for device in short:
                if queues[device]:
                    candidate.recompute[queues[device].pop(0)] = True
            other.evaluate()
            short = [device for device in devices if other.peaks[device] > self.setting.limits[device]]
        return other

    def free_buffers(self) -> None:
        """Free the buffers, which only evaluation and annealing need."""
        self._buffers = None


def start_walk(setting: Setting, schedule: Schedule, cuts: Cuts, *, split: bool) -> Walk:
    """A walk that starts with a schedule on some cuts.

    Args:
        schedule: placement and order.
        split: whether to replace each B by I and W.
    """
    stages = len(schedule.placement)
    orders, lengths = encode(schedule.device_actions, setting.microbatches, split=range(stages) if split else ())
    candidate = Candidate(
        np.array(schedule.placement, dtype=np.int64), np.array(cuts, dtype=np.int64), np.zeros(stages, dtype=np.bool_),
        orders, lengths,
    )  # fmt: skip
    return Walk(setting, schedule.name, candidate, schedule.offload)


def best_by_placement(
    walks: list[Walk], most: int, each: int, key: Callable[[Walk], Any] = lambda walk: walk.value
) -> list[Walk]:
    """The ``most`` best walks by ``key``, best first; at most ``each`` with the same placement in the same setting."""
    kept: list[Walk] = []
    counts: dict[tuple[int, bytes], int] = {}
    for walk in sorted(walks, key=key):
        alike = id(walk.setting), walk.best.placement.tobytes()
        counts[alike] = counts.get(alike, 0) + 1
        if counts[alike] <= each and len(kept) < most:
            kept.append(walk)
    return kept


def ranked(walks: list[Walk]) -> list[Walk]:
    """The walks, best first."""
    return sorted(walks, key=lambda walk: walk.value)


def frontier(walks: list[Walk]) -> Iterator[Walk]:
    """The Pareto frontier of time and memory of the walks that fit, fastest first: each one's fullest device holds less
    than that of every faster walk."""
    least = INFINITY
    for walk in ranked([walk for walk in walks if walk.excess == 0]):
        most = max(walk.peaks)
        if most < least:
            least = most
            yield walk
