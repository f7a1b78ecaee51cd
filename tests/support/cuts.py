"""Plans made by hand, for tests that need a certain cut and schedule."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve
from panpipe.core.actions import Action, Kind
from panpipe.core.capture.batch.batch_dims import BatchDims
from panpipe.core.capture.batch.find_batch_dims import find_batch_dims
from panpipe.core.capture.export.operators import Operators, operators_of, tensor_bytes
from panpipe.core.capture.export.step import capture_step
from panpipe.core.plan.plan import MemoryPolicy, Plan
from panpipe.core.schedules.problem import Schedule, ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import even_plan as even
from panpipe.runtimes.microbatches import split_batch
from panpipe.runtimes.programs.compiled import Programs
from torch.utils import _pytree as pytree

from .early_gradients import early_gradients
from .models import Case


def captured(case: Case, dtype: torch.dtype, rows: int, microbatches: int, device: str = "cpu") -> Operators:
    """The case's step for the largest of its microbatches."""
    model = case.model(dtype).to(device)
    piece = split_batch(batch_on(case, rows, dtype, device), microbatches, dims_once(case, dtype, rows, device))[0]
    return operators_of(capture_step(model, case.step, piece.batch, device=device))


def captured_once(case: Case, dtype: torch.dtype, rows: int, microbatches: int, device: str = "cpu") -> Operators:
    """The same object for the same arguments: pipelines of the same case share its capture."""
    return _captured(case, dtype, rows, microbatches, device)


_captured = functools.cache(captured)


@functools.cache
def dims_once(case: Case, dtype: torch.dtype, rows: int, device: str) -> BatchDims:
    """The dimensions of the case's batch that hold the samples."""
    return find_batch_dims(case.model(dtype).to(device), case.step, batch_on(case, rows, dtype, device))


@functools.cache
def programs_of(case: Case, dtype: torch.dtype, rows: int, microbatches: int, device: str) -> Programs:
    """The stage programs of what :func:`captured_once` returns, which pipelines of all plans share and add to."""
    return {}


def batch_on(case: Case, rows: int, dtype: torch.dtype, device: str) -> Any:
    """The case's batch on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), case.batch(rows, dtype))


def split_backwards(schedule: Schedule) -> Schedule:
    """The schedule with every B as an I and, one action later, its W."""
    orders = []
    for actions in schedule.device_actions:
        order: list[Action] = []
        for action in actions:
            order.append(evolve(action, kind=Kind.I) if action.kind is Kind.B else action)
            order += [evolve(late, kind=Kind.W) for late in order[-2:-1] if late.kind is Kind.I]
        done = {(a.stage, a.microbatch) for a in order if a.kind is Kind.W}
        order += [evolve(a, kind=Kind.W) for a in order if a.kind is Kind.I and (a.stage, a.microbatch) not in done]
        orders.append(tuple(order))
    return evolve(schedule, device_actions=tuple(orders))


def even_plan(
    operators: Operators,
    devices: int,
    microbatches: int,
    schedule_name: str = "1f1b",
    chunks: int = 1,
    split: bool = False,
    early: int = 0,
    recompute: Sequence[int] | None = (),
) -> Plan:
    """As many operators in each stage; the schedule as it is, or with its backwards split, or its last ones.

    Stages in ``recompute`` do, or all where it is None.
    """
    schedule = find_family(schedule_name).build(ScheduleProblem(devices, microbatches, chunks))
    schedule = split_backwards(schedule) if split else schedule
    if early:
        orders = early_gradients(schedule.device_actions, schedule.placement, early)
        schedule = evolve(schedule, device_actions=orders)
    sizes = {n: tensor_bytes(operators.values[p]) for p, n in operators.step.parameters.items()}
    again = range(len(schedule.placement)) if recompute is None else recompute
    return evolve(even(operators.graph, schedule, sizes), memory=MemoryPolicy(recompute=tuple(again)))


def irregular_plan(operators: Operators, placement: Sequence[int], microbatches: int) -> Plan:
    """One stage for each entry of ``placement``, its device; devices may have unequal numbers of stages.

    All forwards come first; every third W waits for the end of the next microbatch.
    """
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for m in range(microbatches):
        for stage, device in enumerate(placement):
            orders[device].append(Action(stage, Kind.F, m))
    for m in range(microbatches + 1):
        for stage, device in reversed(list(enumerate(placement))):
            late = stage % 3 == 0
            if m < microbatches:
                orders[device].append(Action(stage, Kind.I, m))
            if late and m:
                orders[device].append(Action(stage, Kind.W, m - 1))
            elif not late and m < microbatches:
                orders[device].append(Action(stage, Kind.W, m))
    schedule = Schedule("irregular", tuple(placement), microbatches, tuple(map(tuple, orders)))
    sizes = {n: tensor_bytes(operators.values[p]) for p, n in operators.step.parameters.items()}
    return even(operators.graph, schedule, sizes)
