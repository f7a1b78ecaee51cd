"""Checks a model: whether it trains as a pipeline, which parts cannot be cut, and how it differs from one process."""

import copy
import functools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ...core.capture.batch.batch_dims import AUTO
from ...core.capture.batch.find_batch_dims import find_batch_dims
from ...core.capture.export.few_operators import refuse_too_few
from ...core.capture.export.operators import Operators, operators_of, tensor_bytes
from ...core.capture.export.step import capture_step
from ...core.capture.graph.nodes import is_view, written_arguments
from ...core.capture.regions.breaks import StepFunction
from ...core.capture.values.containers import flatten_batch
from ...core.capture.values.user_lines import line_of
from ...core.errors import PanpipeError, RequestError
from ...core.plan.plan import Plan
from ...core.schedules.problem import ScheduleProblem
from ...core.schedules.registry import find_family
from ...core.search import even_plan
from ..batch.example import Example
from ..batch.losses import whole_and_mean
from ..launch.team import Team
from ..microbatches import Microbatch, split_batch
from ..pipeline import Pipeline
from ..programs.stage_compiler import ProgramOptions
from ..session import Session
from ..trainer import Trainer
from ..update.training import Training
from .parity import Distance, distance_to_one_process

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-2)
SEED = 3
SCHEDULES = (("1f1b", 1), ("v-half", 2))
"""The schedules to check, with their stages per device: one with whole backwards, and a V with split ones."""
TOLERANCES = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-4, 1e-5)}
"""Largest distances that count as rounding: of losses, parameters and buffers; of gradients."""
LARGE_SHARE = 0.1
"""Share of a step's operations from which on an operator that cannot be cut is reported."""


@frozen
class UncutOperator:
    """Operations that must stay in one stage because one of them writes in place.

    Args:
        line: the user's line that writes.
    """

    operator: str
    share: float
    line: str


@frozen
class Check:
    """The result of running one plan.

    Args:
        distance: to one process, or None if the plan did not run.
        problem: why it did not run; empty if it did.
        too_many_stages: whether it did not run because the model has fewer operators than the plan has stages.
    """

    devices: int
    schedule: str
    stages: int
    distance: Distance | None
    problem: str
    seconds: float
    too_many_stages: bool = False


@frozen
class Findings:
    """The results of `check_model`.

    Args:
        operators: number of operators between which the model can be cut.
        regions: part that stays Python → the line that needs a value there.
        uncut: operators with a large share of the model, which no cut divides.
        causes: part that stays Python, as in ``regions`` → the reason why its line is not captured.
        remark: both values, if the loss of the whole batch is not the mean over its microbatches; else empty.
    """

    model: str
    dtype: torch.dtype
    operators: int
    capture_s: float
    regions: dict[str, str]
    uncut: tuple[UncutOperator, ...]
    checks: tuple[Check, ...] = field(default=())
    causes: dict[str, str] = field(factory=dict)
    remark: str = ""

    @property
    def healthy(self) -> bool:
        """Whether the result of every plan that the model has enough operators for equals that of one process."""
        possible = [check for check in self.checks if not check.too_many_stages]
        return bool(possible or not self.checks) and all(map(self.right, possible))

    def right(self, check: Check) -> bool:
        """Whether a check is within rounding."""
        return check.distance is not None and check.distance.within(*TOLERANCES[self.dtype])


class CheckedModel:
    """A model, its step and an example batch, in one dtype, captured once for all checks.

    Args:
        microbatches: into how many the batch is cut; fewer if it has fewer samples.
        dtype: float64, or float32 if an operator does not support float64.

    Attributes:
        operators: of the captured step.
        programs: of stages, for all checks.

    Raises:
        RequestError: the step cannot be captured.
    """

    def __init__(
        self,
        model: nn.Module,
        step: StepFunction,
        batch: Any,
        microbatches: int,
        dtype: torch.dtype = torch.float64,
        batch_dims: Any = AUTO,
    ) -> None:
        self.model, self.step, self.dtype = copy.deepcopy(model).to(dtype), step, dtype
        leaves, nesting = flatten_batch(batch)
        self.batch = nesting.batch([in_dtype(leaf, dtype) for leaf in leaves])
        self.batch_dims = batch_dims
        self.dims = find_batch_dims(self.model, step, self.batch, given=batch_dims, microbatches=microbatches)
        start = time.perf_counter()
        pieces = split_batch(self.batch, microbatches, self.dims, fewer=True)
        self.microbatches = len(pieces)
        self.piece: Microbatch = pieces[0]
        captured = capture_step(self.model, step, pieces[0].batch)
        self.operators: Operators = operators_of(captured)
        self.capture_s = time.perf_counter() - start
        self.programs = ProgramOptions()

    def check(
        self, team: Team, schedule: str, chunks: int, steps: int = 3, change: Callable[[Plan], Plan] = lambda plan: plan
    ) -> Check:
        """Train with one plan, and compare with one process.

        Args:
            schedule: name of a family.
            chunks: stages per device.
            steps: how many to train.
            change: returns the plan to run, of the same stages; as for saved tensors that are to be offloaded.
        """
        start, devices = time.perf_counter(), team.size
        found, problem = None, ""
        try:
            found = self._distance(team, schedule, chunks, steps, change)
        except PanpipeError as error:
            problem = str(error)
        too_many = found is None and devices * chunks > len(self.operators.graph.nodes)
        return Check(devices, schedule, devices * chunks, found, problem, time.perf_counter() - start, too_many)

    def whole_and_mean(self) -> tuple[float, float] | None:
        """The loss of the whole batch and the mean over its microbatches, if they differ; whatever tracing finds."""
        written = frozenset(dict(self.model.named_parameters()))
        return whole_and_mean(self.model, self.step, self.batch, self.dims, self.microbatches, written)

    def _distance(self, team: Team, schedule: str, chunks: int, steps: int, change: Callable[[Plan], Plan]) -> Distance:
        operators = self.operators
        refuse_too_few(operators, team.size * chunks)
        problem = ScheduleProblem(team.size, self.microbatches, chunks)
        sizes = {n: tensor_bytes(operators.values[p]) for p, n in operators.step.parameters.items()}
        plan = change(even_plan(operators.graph, find_family(schedule).build(problem), sizes))
        mine, alone = copy.deepcopy(self.model), copy.deepcopy(self.model)
        example = Example(mine, self.step, self.piece, operators)
        pipe = Pipeline(Session(Trainer(example, plan, team, Training(optimizer=OPTIMIZER, seed=SEED), self.programs)))
        return distance_to_one_process(
            pipe, team, alone, self.step, self.batch, OPTIMIZER, microbatches=self.microbatches, seed=SEED, steps=steps,
            batch_dims=self.batch_dims,
        )  # fmt: skip


def check_model(
    model: nn.Module,
    step: StepFunction,
    batch: Any,
    teams: Sequence[Callable[[], Team]],
    microbatches: int = 3,
    batch_dims: Any = AUTO,
) -> Findings:
    """Capture a step, run it with several plans, and compare with one process.

    Args:
        teams: functions that create the devices to check on.

    Raises:
        RequestError: the step cannot be captured at all.
    """
    checked = _checked_model(model, step, batch, microbatches, batch_dims)
    checks = []
    for make in teams:
        for schedule, chunks in SCHEDULES:
            team = make()
            try:
                checks.append(checked.check(team, schedule, chunks))
            finally:
                team.close()
    operators, losses = checked.operators, checked.whole_and_mean()
    remark = (
        ""
        if losses is None
        else (f"the loss is {losses[0]:.6g} for the whole batch and {losses[1]:.6g} as the mean over its microbatches")
    )
    return Findings(
        operators.step.model_name, checked.dtype, len(operators.graph.nodes), checked.capture_s,
        operators.step.regions, uncut_operators(operators), tuple(checks), operators.step.causes, remark,
    )  # fmt: skip


def _checked_model(
    model: nn.Module, step: StepFunction, batch: Any, microbatches: int, batch_dims: Any
) -> CheckedModel:
    """The captured step in float64 if every operator supports it, otherwise in float32."""
    try:
        checked = CheckedModel(model, step, batch, microbatches, torch.float64, batch_dims)
        alone = copy.deepcopy(checked.model)
        step(alone, checked.batch)
    except (RuntimeError, RequestError, NotImplementedError):
        return CheckedModel(model, step, batch, microbatches, torch.float32, batch_dims)
    return checked


def in_dtype(leaf: Any, dtype: torch.dtype) -> Any:
    """A leaf of a batch; a tensor of floating-point numbers in another type."""
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def uncut_operators(operators: Operators) -> tuple[UncutOperator, ...]:
    """Operators with a large share of all operations because they write in place; no cut can divide one of them."""
    computed = {name: [m for m in members if not _is_view(operators, m)] for name, members in operators.members.items()}
    total = sum(map(len, computed.values()))
    found = []
    for name, members in computed.items():
        writes = [m for m in members if written_arguments(operators.nodes[m])]
        if writes and len(members) > max(LARGE_SHARE * total, 4):
            line = next(filter(None, (line_of(operators.nodes[member]) for member in writes)), "")
            found.append(UncutOperator(name, len(members) / total, line))
    return tuple(found)


def _is_view(operators: Operators, member: str) -> bool:
    node = operators.nodes[member]
    return node.target is operator.getitem or is_view(node)
