"""A problem with a placement, in the arrays that the compiled search reads."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from attrs import frozen

from ..actions import Action, Kind
from ..evaluate.coding import FORWARD, INPUT, WEIGHT, Floats, Integers
from .problem import Schedule, ScheduleProblem
from .scored import costs_of

CODE = {Kind.F: FORWARD, Kind.I: INPUT, Kind.B: INPUT, Kind.W: WEIGHT}
"""What a kind of action is in ``decode``."""
ROUNDING = 1e-9
"""Share of a memory limit that sums of floating-point numbers may exceed it by."""


@frozen(eq=False)
class Instance:
    """Arrays by stage, unless said otherwise.

    Args:
        problem: what they are made from.
        placement: device of every stage.
        stages_on: (devices, chunks).
        times: of F, I and W, (3, stages).
        backward: time of the full backward.
        hops: delay of a message from the stage before.
        saved, kept: held after F, and after I.
        limits: per device; infinite without one.
    """

    problem: ScheduleProblem
    placement: Integers
    stages_on: Integers
    times: Floats
    backward: Floats
    hops: Floats
    saved: Floats
    kept: Floats
    limits: Floats

    @property
    def need(self) -> Floats:
        """What F has to reserve until I is through: I may leave more than F saved."""
        return np.maximum(self.saved, self.kept)

    @property
    def least_memory(self) -> float:
        """The least limit that any order can keep: one microbatch on all stages of a device, its backwards fused."""
        return float(self.saved[self.stages_on].sum(axis=1).max())

    @property
    def too_large_to_split(self) -> "np.ndarray":
        """Stages of devices whose limit does not hold one microbatch between I and W of all of them."""
        short = self.need[self.stages_on].sum(axis=1) > self.limits
        return np.asarray(short[self.placement], dtype=np.bool_)

    def fused_times(self, fused: "np.ndarray") -> Floats:
        """Times of F, I and W where the fused stages run B in I's place."""
        times = self.times.copy()
        times[INPUT] = np.where(fused, self.backward, times[INPUT])
        times[WEIGHT] = np.where(fused, 0.0, times[WEIGHT])
        return times

    def fused_need(self, fused: "np.ndarray") -> Floats:
        """What F reserves; a fused stage needs no more than it saves."""
        return np.where(fused, self.saved, self.need)

    def fused_kept(self, fused: "np.ndarray") -> Floats:
        """Held after I; a fused stage holds nothing more after its backward."""
        return np.where(fused, self.saved, self.kept)

    def for_orders(
        self, fused: "np.ndarray"
    ) -> tuple[int, Integers, Floats, Floats, Floats, Floats, Floats, "np.ndarray"]:
        """What `local` reads: count, placement, times, hops, saved, kept, limits and fused."""
        return (
            self.problem.microbatches, self.placement, self.fused_times(fused), self.hops, self.saved,
            self.fused_kept(fused), self.limits, fused,
        )  # fmt: skip

    def schedule(self, name: str, orders: Integers, lengths: Integers, fused: "np.ndarray") -> Schedule:
        """The schedule of decoded orders."""
        stages, count = len(self.placement), self.problem.microbatches
        by_kind = _actions(stages, count)
        backward = [
            action
            for stage, whole in enumerate(fused.tolist())
            for action in by_kind[Kind.B if whole else Kind.I][stage * count : (stage + 1) * count]
        ]
        coded = (*by_kind[Kind.F], *backward, *by_kind[Kind.W])
        rows = [
            tuple(coded[code] for code in order[:length])
            for order, length in zip(orders.tolist(), lengths.tolist(), strict=True)
        ]
        return Schedule(name, tuple(self.placement.tolist()), count, tuple(rows))


@lru_cache(maxsize=16)
def _actions(stages: int, count: int) -> dict[Kind, list[Action]]:
    """The compute actions of each kind, stage by stage; shared by all orders of that size."""
    places = [(stage, microbatch) for stage in range(stages) for microbatch in range(count)]
    return {
        kind: [Action(stage, kind, microbatch) for stage, microbatch in places]
        for kind in (Kind.F, Kind.I, Kind.B, Kind.W)
    }


def instance(problem: ScheduleProblem, placement: Sequence[int]) -> Instance:
    """The arrays of a problem."""
    costs = costs_of(problem)
    device_of = np.array(placement, dtype=np.int64)
    own = [[s for s, d in enumerate(placement) if d == device] for device in range(problem.devices)]
    limit = np.inf if problem.memory_limit is None else problem.memory_limit * (1 + ROUNDING)
    saved = np.array([cost.saved_bytes for cost in costs], dtype=float)
    kept = np.array([cost.kept_bytes for cost in costs], dtype=float)
    times = np.zeros((3, len(costs)))
    times[FORWARD] = [cost.forward_s for cost in costs]
    times[INPUT] = [cost.backward_input_s for cost in costs]
    times[WEIGHT] = [cost.backward_weight_s for cost in costs]
    hops = np.zeros(len(costs))
    hops[1:] = np.where(device_of[1:] != device_of[:-1], problem.hop_s, 0.0)
    return Instance(
        problem, device_of, np.array(own, dtype=np.int64), times,
        np.array([cost.full_backward_s for cost in costs], dtype=float), hops, saved, kept,
        np.full(problem.devices, limit),
    )  # fmt: skip


def codes_of(schedule: Schedule) -> tuple["np.ndarray", Integers, Integers]:
    """Which stages run I and W as B, the orders coded as in ``decode``, and their lengths.

    A stage with backwards of both kinds has all of them split: its B are I followed by W.
    """
    stages, count = len(schedule.placement), schedule.microbatches
    fused = np.ones(stages, dtype=np.bool_)
    rows: list[list[int]] = []
    for order in schedule.device_actions:
        fused[[action.stage for action in order if action.kind is Kind.I]] = False
    for order in schedule.device_actions:
        row: list[int] = []
        for action in order:
            assert action.microbatch is not None
            place = action.stage * count + action.microbatch
            row.append(CODE[action.kind] * stages * count + place)
            if action.kind is Kind.B and not fused[action.stage]:
                row.append(WEIGHT * stages * count + place)
        rows.append(row)
    orders = np.zeros((len(rows), 3 * stages * count // len(rows)), dtype=np.int64)
    for device, row in enumerate(rows):
        orders[device, : len(row)] = row
    return fused, orders, np.array([len(row) for row in rows], dtype=np.int64)
