"""A pipeline: a plan made ready on its devices, stepped batch by batch."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.actions import Action
from ..core.capture.operators import Operators, operators_of
from ..core.capture.programs import StagePrograms
from ..core.capture.randomness import random_key
from ..core.capture.step import StepFunction, capture_step
from ..core.errors import RequestError
from ..core.lowering import lower
from ..core.plan import Plan
from ..core.trace import Trace
from .compiled import Compiled, compile_stages
from .compute import compute_device, compute_queue
from .executor import Executor, StepInputs, StepRecord
from .microbatches import Microbatch, Shape, split_batch
from .ownership import own_parameters, release_others
from .results import SharedResults
from .stage_run import StageRun
from .state import OptimizerFactory, StageState
from .team import Team
from .tied import TiedReduction
from .tracing import measured_trace

_MAX_SHAPES = 8
"""Shapes of microbatches compiled for one pipeline: each costs a capture and keeps its programs."""


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
    """

    def __init__(
        self, model: nn.Module, step: StepFunction, team: Team, plan: Plan, operators: Operators, shape: Shape,
        optimizer: OptimizerFactory | None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.model = model
        self.steps = 0
        self.metrics: dict[str, float] = {}
        self._step, self._team, self._seed = step, team, seed
        self._stages = [stage.nodes for stage in plan.stages]
        self._local = [s.index for s in plan.stages if s.device in team.local]
        self._compiled: dict[Shape, Compiled] = {shape: compile_stages(operators, self._stages, self._local)}
        first = self._compiled[shape]
        parameters = own_parameters(model, plan, first.programs, team)
        buffers = dict(model.named_buffers())
        self._states = {
            i: StageState(parameters[i], {name: buffers[name] for name in first.programs[i].inputs.buffers}, optimizer)
            for i in self._local
        }
        self._runs: dict[tuple[Shape, int], dict[int, StageRun]] = {}
        self._lowered: tuple[tuple[Action, ...], ...] = lower(plan)
        tied = {w.name for w in plan.tied}
        self._replicas = {(i, name): p for i in self._local for name, p in parameters[i].items() if name in tied}
        self._outputs = operators.step.outputs
        shared = [self._outputs.loss, self._outputs.weight, *self._outputs.metrics.values()]
        self._metric_names = [name for name, node in self._outputs.metrics.items() if isinstance(node, str)]
        self._result_device = {n: self._device_of(operators, n) for n in shared if isinstance(n, str)}
        self._loss_dtype = operators.values[self._outputs.loss].dtype
        self._device = compute_device([*model.parameters(), *model.buffers()])
        self._queues = {device: compute_queue(self._device) for device in team.local}
        self._executors: dict[int, Executor] = {}
        self._warn_of_unused(operators)

    def _device_of(self, operators: Operators, node: str) -> int:
        owner = operators.owner.get(node)
        if owner is None:  # every stage could compute it; the loss's does
            return self._device_of(operators, self._outputs.loss)
        return next(stage.device for stage in self.plan.stages if owner in stage.nodes)

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
        return self._run(batch, trace=False)[0]

    def trace_step(self, batch: Any) -> tuple[Tensor, Trace]:
        """Train on one batch and record what every local device did.

        Returns:
            The loss, and the trace of all devices, on every rank.
        """
        loss, records = self._run(batch, trace=True)
        return loss, self._gather(records)

    @property
    def programs(self) -> dict[int, StagePrograms]:
        """Programs of the stages in this process, for the example's largest microbatch."""
        return next(iter(self._compiled.values())).programs

    @property
    def stage_parameters(self) -> dict[int, dict[str, nn.Parameter]]:
        """Parameters of the stages in this process, by stage and qualified name."""
        return {index: state.parameters for index, state in self._states.items()}

    def release_others(self) -> None:
        """Let go of the parameters that other processes own; what is left of them here is meta tensors."""
        if len(self._team.local) < self._team.size:
            written = next(iter(self._compiled.values())).operators.step.mutated_buffers
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
            _, records = self._run(batch, trace=True, update=False)
            traces.append(self._gather(records))
        for buffer, value in buffers:
            buffer.copy_(value)
        for state in self._states.values():
            state.clear_gradients()
        self.steps = count
        return traces

    def _gather(self, records: dict[int, StepRecord]) -> Trace:
        return measured_trace(self.plan, self._team.everywhere(lambda device: records[device]))

    def _run(self, batch: Any, trace: bool, update: bool = True) -> tuple[Tensor, dict[int, StepRecord]]:
        pieces, spec = split_batch(batch, self.plan.microbatches)
        for piece in {piece.shape: piece for piece in (pieces[0], pieces[-1])}.values():
            self._ensure_compiled(piece, spec)
        random = any(stage.inputs.random for stage in self.programs.values())
        one = random_key(self._seed, self.steps, 0)
        keys = [random_key(self._seed, self.steps, m) if random else one for m in range(len(pieces))]
        constant = self._outputs.weight is not None and not isinstance(self._outputs.weight, str)
        shares = [1.0 if constant else piece.weight for piece in pieces]
        seeds = torch.tensor(shares, dtype=self._loss_dtype, device=self._device)
        scalars: dict[int, list[list[float]]] = {}

        def work(device: int) -> StepRecord:
            executor = self._executor(device)
            shared = SharedResults(self._outputs, self._result_device, executor.backend, self._device, shares)
            weight = self._outputs.weight if isinstance(self._outputs.weight, str) else None

            def before_update(record: StepRecord) -> None:
                shared.announce(record)
                if self._outputs.weight is not None:
                    # A weighted mean's sum of weights is known when the last microbatch is through.
                    scalars[device] = shared.collect()
                    total = sum(row[1] for row in scalars[device])
                    for index in (stage.index for stage in self.plan.stages_on(device)):
                        self._states[index].scale_gradients(1 / total)

            inputs = StepInputs(pieces, keys, list(seeds.unbind()), weight)
            runs = self._stage_runs(device, pieces)
            with self._queues[device].active():
                record = executor.run(runs, inputs, trace=trace, update=update, before_update=before_update)
                if device not in scalars:
                    scalars[device] = shared.collect()
            record.results.clear()
            return record

        records = self._team.run_local(work)
        self.steps += 1
        rows = scalars[self._team.local[0]]
        total = sum(row[1] for row in rows) if self._outputs.weight is not None else 1.0
        self.metrics = {
            name: sum(row[2 + i] * row[1] for row in rows) / total for i, name in enumerate(self._metric_names)
        }
        return torch.tensor(sum(row[0] * row[1] for row in rows) / total, dtype=self._loss_dtype), records

    def _executor(self, device: int) -> Executor:
        """The device's executor, at the transport's end that is open now."""
        backend = self._team.backend(device)
        if device not in self._executors:
            reduction = TiedReduction(self.plan, self._replicas)
            queue = self._queues[device]
            self._executors[device] = Executor(self.plan, self._lowered, backend, queue, reduction)
        self._executors[device].backend = backend
        return self._executors[device]

    def _stage_runs(self, device: int, pieces: Sequence[Microbatch]) -> list[dict[int, StageRun]]:
        """For each microbatch, the device's stages."""
        for shape in {piece.shape for piece in (pieces[0], pieces[-1])}:
            if (shape, device) not in self._runs:
                compiled = self._compiled[shape]
                step = compiled.operators.step
                self._runs[shape, device] = {
                    stage.index: StageRun(
                        stage.index, compiled.programs[stage.index], compiled.layout, self._states[stage.index],
                        step.constants, step.outputs.loss,
                    )
                    for stage in self.plan.stages_on(device)
                }  # fmt: skip
        return [self._runs[piece.shape, device] for piece in pieces]

    def _ensure_compiled(self, piece: Microbatch, spec: pytree.TreeSpec) -> None:
        if piece.shape in self._compiled:
            return
        if len(self._compiled) >= _MAX_SHAPES:
            raise RequestError(
                f"this batch has microbatches of a new shape, and {_MAX_SHAPES} shapes are compiled already: "
                "pad batches to a few fixed shapes"
            )
        if self.steps and 0 in self._team.local:
            warnings.warn("a microbatch of a new shape: capturing the step for it", stacklevel=4)
        batch = pytree.tree_unflatten(list(piece.leaves), spec)
        operators = operators_of(capture_step(self.model, self._step, batch))
        known = next(iter(self._compiled.values())).operators
        if list(operators.members) != list(known.members):
            raise RequestError(
                "the step runs different operators for a batch of this shape than for the example: "
                "the plan does not fit; give batches of the example's shape"
            )
        self._compiled[piece.shape] = compile_stages(operators, self._stages, self._local)
