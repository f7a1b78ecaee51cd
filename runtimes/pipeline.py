"""A pipeline: a plan made ready on its devices, stepped batch by batch."""

import warnings
from typing import Any

from torch import Tensor, nn

from ..core.capture.operators import Operators
from ..core.capture.programs import StagePrograms
from ..core.capture.step import StepFunction
from ..core.plan import Plan
from ..core.trace import Trace
from .compiled import compile_stages
from .compute import compute_device
from .microbatches import Shape, split_batch
from .ownership import own_parameters, release_others
from .prepared import Preparations
from .shapes import MAX_SHAPES, Shapes
from .state import OptimizerFactory, StageState
from .steps import StepResult, StepRunner
from .team import Team
from .tracing import measured_trace


class Pipeline:
    """A model that trains as a pipeline.

    Args:
        model: the user's module.
        step: ``step(model, microbatch)``.
        team: the devices.
        plan: what runs where; validated.
        operators: the captured step, for the largest microbatch.
        shape: the shape of microbatch that it was captured for.
        optimizer: makes each stage's optimizer; None to leave gradients to the caller.
        seed: of all random numbers.
        max_shapes: for how many shapes of microbatches programs are kept.
    """

    def __init__(
        self, model: nn.Module, step: StepFunction, team: Team, plan: Plan, operators: Operators, shape: Shape,
        optimizer: OptimizerFactory | None, seed: int = 0, max_shapes: int = MAX_SHAPES,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.model = model
        self.steps = 0
        self.metrics: dict[str, float] = {}
        self._team, self._shape = team, shape
        local = [s.index for s in plan.stages if s.device in team.local]
        first = compile_stages(operators, [stage.nodes for stage in plan.stages], local)
        self._shapes = Shapes(model, step, team, shape, first, max_shapes)
        parameters = own_parameters(model, plan, first.programs, team)
        buffers = dict(model.named_buffers())
        self._states = {
            i: StageState(parameters[i], {name: buffers[name] for name in first.programs[i].inputs.buffers}, optimizer)
            for i in local
        }
        self._preparations = Preparations(plan, self._shapes, self._states, model)
        device = compute_device([*model.parameters(), *model.buffers()])
        self._runner = StepRunner(plan, self._preparations, self._states, team, device, seed)
        self._warn_of_unused(operators)

    def _warn_of_unused(self, operators: Operators) -> None:
        read = {name for node in operators.graph.nodes for name in node.parameters}
        unused = [n for n, p in self.model.named_parameters() if n not in read and p.requires_grad]
        if unused and 0 in self._team.local:
            shown = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
            warnings.warn(f"{shown}: the loss does not depend on it; it keeps no gradient, as in eager", stacklevel=4)

    def step(self, batch: Any) -> Tensor:
        """Train on one batch: forward, backward, reduction and optimizer step.

        Args:
            batch: a whole batch, as the example was; every rank passes the same one.

        Returns:
            The loss, a scalar tensor, on every rank. Other parts of the step's result are in ``metrics``.

        Raises:
            RequestError: the batch does not fit the plan.
            WorkerError: a worker stopped.
        """
        return self._run(batch, trace=False).loss

    def trace_step(self, batch: Any) -> tuple[Tensor, Trace]:
        """Train on one batch and record what every local device did.

        Returns:
            The loss, and the trace of all devices, on every rank.
        """
        done = self._run(batch, trace=True)
        return done.loss, self._gather(done)

    @property
    def programs(self) -> dict[int, StagePrograms]:
        """Programs of the stages in this process, for the shape of microbatch used last."""
        return self._shapes.latest.programs

    @property
    def stage_parameters(self) -> dict[int, dict[str, nn.Parameter]]:
        """Parameters of the stages in this process, by stage and qualified name."""
        return {index: state.parameters for index, state in self._states.items()}

    def release_others(self) -> None:
        """Let go of the parameters that other processes own; what is left of them here is meta tensors."""
        if len(self._team.local) < self._team.size:
            written = self._shapes.latest.operators.step.mutated_buffers
            release_others(self.model, self.programs, written)

    def close(self) -> None:
        """Let go of connections."""
        self._team.close()

    # One step

    def rehearse(self, batch: Any, steps: int) -> list[Trace]:
        """Run some steps that change nothing; the same traces on every rank.

        Buffers are put back, optimizers are not stepped, and the count of steps stays, so that training begins as it
        would have without.
        """
        buffers = [(b, b.clone()) for state in self._states.values() for b in state.buffers.values()]
        count, traces = self.steps, []
        for _ in range(steps):
            traces.append(self._gather(self._run(batch, trace=True, update=False)))
        for buffer, value in buffers:
            buffer.copy_(value)
        for state in self._states.values():
            state.clear_gradients()
        self.steps = count
        return traces

    def _gather(self, done: StepResult) -> Trace:
        return measured_trace(done.plan, self._team.everywhere(lambda device: done.records[device]))

    def _run(self, batch: Any, trace: bool, update: bool = True) -> StepResult:
        pieces, spec = split_batch(batch, self.plan.microbatches, fewer=True, like=self._shape)
        prepared, remark = self._preparations.of(pieces, spec)
        if remark is not None and self.steps and 0 in self._team.local:
            warnings.warn(remark, stacklevel=3)
        done = self._runner.run(prepared, pieces, self.steps, trace, update)
        self.steps += 1
        self.metrics = done.metrics
        return done
