"""A problem with a placement, in the arrays that the compiled search reads."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from ...actions import Kind
from ...plan.memory import saved_bytes
from ...timing.coding import FORWARD, INPUT, WEIGHT, Floats, Integers, decode_orders, encode
from ...timing.compiled import Scratch, StageArrays, fill_saved, make_scratch, make_stage_arrays
from ..problem import Schedule, ScheduleProblem
from ..scored import ROUNDING, costs_of
from .decode import SchedulerInput


@frozen(eq=False)
class Instance:
    """A problem with a placement, as arrays with an entry for each stage unless stated otherwise.

    Args:
        problem: the problem.
        placement: device of every stage.
        stages_on: (devices, chunks).
        times: of F, I and W, (3, stages).
        backward: time of the full backward.
        hops: delay of a message from the previous stage.
        saved, kept: bytes held after F, and after I.
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
        """Bytes that F has to reserve until I ends: after I a microbatch may hold more than after F."""
        return np.maximum(self.saved, self.kept)

    @property
    def least_memory(self) -> float:
        """The smallest limit that any order can keep: one microbatch on all stages of a device, its backwards fused."""
        return float(self.saved[self.stages_on].sum(axis=1).max())

    @property
    def too_large_to_split(self) -> "np.ndarray":
        """Stages of devices whose limit does not fit one microbatch between I and W of all their stages."""
        short = self.need[self.stages_on].sum(axis=1) > self.limits
        return np.asarray(short[self.placement], dtype=np.bool_)

    def fused_times(self, fused: "np.ndarray") -> Floats:
        """Times of F, I and W where the fused stages run B in I's place."""
        times = self.times.copy()
        times[INPUT] = np.where(fused, self.backward, times[INPUT])
        times[WEIGHT] = np.where(fused, 0.0, times[WEIGHT])
        return times

    def fused_need(self, fused: "np.ndarray") -> Floats:
        """Bytes that F reserves; a fused stage needs no more than it saves."""
        return np.where(fused, self.saved, self.need)

    def fused_kept(self, fused: "np.ndarray") -> Floats:
        """Bytes held after I; a fused stage holds nothing after its backward."""
        return np.where(fused, self.saved, self.kept)

    def scheduler_input(self, fused: "np.ndarray") -> SchedulerInput:
        """The input of ``decode`` if these stages are fused."""
        return SchedulerInput(
            self.problem.microbatches, self.placement, self.stages_on, self.fused_times(fused), self.hops,
            self.fused_need(fused), self.fused_kept(fused), self.limits, fused,
        )  # fmt: skip

    def for_orders(self) -> tuple[int, Integers, StageArrays, Floats]:
        """The arguments of `local`: count, placement, costs and limits."""
        stages = len(self.placement)
        costs = make_stage_arrays(stages, stages - 1)
        costs.times[:] = *self.times, self.backward
        before, after = np.arange(stages - 1), np.arange(1, stages)
        costs.forward_first[1:], costs.back_first[:-1] = np.arange(stages), np.arange(stages)
        costs.back_first[-1] = stages - 1
        costs.forward_from[:], costs.forward_delay[:] = before, self.hops[1:]
        costs.back_from[:], costs.back_delay[:] = after, self.hops[1:]
        for stage in range(stages):
            fill_saved(costs, stage, False, self.saved[stage], 0.0, self.kept[stage])
        return self.problem.microbatches, self.placement, costs, self.limits

    def scratch(self) -> Scratch:
        """Arrays that runs of its orders write to."""
        return make_scratch(len(self.placement), self.problem.microbatches, self.problem.devices)

    def schedule(self, name: str, orders: Integers, lengths: Integers) -> Schedule:
        """The schedule of coded orders."""
        count = self.problem.microbatches
        actions = decode_orders(orders, lengths, len(self.placement), count)
        return Schedule(name, tuple(self.placement.tolist()), count, actions)


def instance(problem: ScheduleProblem, placement: Sequence[int]) -> Instance:
    """The arrays of a problem."""
    costs = costs_of(problem)
    device_of = np.array(placement, dtype=np.int64)
    own = [[s for s, d in enumerate(placement) if d == device] for device in range(problem.devices)]
    limit = np.inf if problem.memory_limit is None else problem.memory_limit * (1 + ROUNDING)
    changes = [saved_bytes(cost) for cost in costs]
    saved = np.array([change[Kind.F][0] for change in changes])
    kept = np.array([-change[Kind.W][1] for change in changes])
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


def codes_of(schedule: Schedule) -> tuple[Integers, Integers]:
    """The coded orders of a schedule, and their lengths.

    In a stage with split and unsplit backwards all are split: each B becomes I followed by W.
    """
    split = {action.stage for order in schedule.device_actions for action in order if action.kind is Kind.I}
    return encode(schedule.device_actions, schedule.microbatches, split=split)
