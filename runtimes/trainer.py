"""Training and evaluation by a plan, batch by batch, on the devices of this process; `Pipeline` is the public class.

example, plan, team ──▶ LocalStages (parameters, buffers, optimizers) ──▶ Workers
                   └──▶ PreparedSteps (by values and shapes) ────┐          │
batch ──▶ cut ──▶ microbatches ──▶ agreed by all ranks: Batch ◀──┘ ──▶ run ◀┘ ──▶ update, or accumulated gradients
                                                                            └──▶ loss, metrics, trace, state
"""

import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.capture.python.refusals import refuse_training_here
from ..core.errors import RequestError, warn_caller
from ..core.logs import set_process
from ..core.plan.plan import Plan
from ..core.trace.trace import Trace
from .batch.batch_agreement import NOT_UPDATED
from .batch.example import Example, ModuleModes
from .devices.compute import ComputeQueue
from .engine.prepared import WEIGHT, Prepared
from .engine.results import Batch, weight_of
from .engine.step_data import StepInputs, StepOptions
from .engine.tracing import measured_trace
from .engine.workers import Clock
from .launch.team import Team
from .microbatches import BatchCutter, WrittenBatches, naming_difference
from .monitor.monitors import Monitor
from .offload.tier import OffloadTier
from .programs.stage_compiler import ProgramOptions
from .training.averages import Averages
from .training.evaluation import ForwardFunction
from .training.plan_setup import PlanSetup, set_up_plan
from .training.state import Accumulated, KeptGradients, PipelineState
from .training.step_checks import StepChecks
from .update.optimizers import stage_optimizer, stage_scheduler
from .update.replica_values import broadcast_from_first, sum_over_replicas
from .update.training import Training
from .update.update import Update
from .weights.checkpoint import save_checkpoint


class Trainer:
    """Trains and evaluates a model by a plan.

    Args:
        example: the user's model and step, captured for the largest microbatch; the microbatch is not kept.
        plan: a valid plan, with SYNC if ``training`` needs all stages at once.
        offload: where offloaded saved tensors go; None for the host's memory.
        monitors: the user's functions that are called with the numbers of each step.

    Attributes:
        model, step, plan, team, training: as given.
        operators: of the captured step.
        whole_model: the user's module; ``model`` is what this rank runs of it.
        optimizers_lent: whether the caller may hold the optimizers of stages.
        stages: parameters, buffers and optimizers of the stages in this process.
        prepared: the prepared steps.
        workers: the devices of this process.
        evaluator: runs forwards.
        averages, checks: of the weights, and of steps.
        offloads: device of this process → its copies of saved tensors to the host.
        state: what is kept between two steps.
        closed: whether it was closed.
        set_up_plan: creates the parts for a plan; nothing is changed.
    """

    def __init__(
        self,
        example: Example,
        plan: Plan,
        team: Team,
        training: Training | None = None,
        programs: ProgramOptions | None = None,
        clock: Clock | None = None,
        offload: OffloadTier | None = None,
        monitors: Sequence[Monitor] = (),
    ) -> None:
        model, training = example.model, training or Training()
        self.operators, self.whole_model = example.operators, team.tensors.whole_model(model)
        self.model, self.step, self.team, self.training = model, example.step, team, training
        self._rates: tuple[int, Optimizer | None, LRScheduler | None] | None = None
        self.optimizers_lent = False
        self.closed, self.state, self._pid = False, PipelineState(training.seed), os.getpid()
        self._shape = example.shape
        self._cutter = BatchCutter(example.shape, plan.microbatches)
        places = example.operators.step.batch_writes
        self._written = WrittenBatches({example.shape.nesting.names[place]: line for place, line in places.items()})
        self.set_up_plan = partial(
            set_up_plan, team=team, training=training, state=self.state, follow_model=self._follow_model, clock=clock,
            offload=offload,
        )  # fmt: skip
        self.adopt(self.set_up_plan(example, plan, programs=programs or ProgramOptions()))
        self._loss_scale = training.loss_scale()
        self.checks = StepChecks(training, monitors, self.stages, self._loss_scale is not None, self.state)
        self._modes = ModuleModes(self.whole_model)
        self.averages = Averages(self.stages, self.save, self.refuse_closed)

    def adopt(self, parts: PlanSetup) -> None:
        """Train by the plan of these parts from now on."""
        self.plan, self.stages, self.prepared = parts.plan, parts.stages, parts.prepared
        self.workers, self.evaluator, self.offloads = parts.workers, parts.evaluator, parts.offloads

    @property
    def queues(self) -> dict[int, ComputeQueue]:
        """Device of this process → its compute queue."""
        return self.workers.queues

    def follow(self, plan: Plan) -> None:
        """Train by another plan of the same stages from now on."""
        self.plan = self.stages.plan = plan

    def replace(self, parts: PlanSetup) -> None:
        """Train by another plan from now on; its stages have no values yet."""
        for each in self.offloads.values():
            each.close()
        self.adopt(parts)
        self.checks.follow(parts.stages)
        self.state.accumulated = None

    def train(self, batch: Any, options: StepOptions) -> Batch:
        """Run one step, and count it.

        Returns:
            The batch, with the loss over all replicas.

        Raises:
            NonFiniteError: the loss or the global norm is not finite, and ``on_nonfinite`` is ``"raise"``.
            RequestError: the batch does not fit, ranks were given different ones, or accumulated gradients were
                cleared.
            WorkerError: a worker stopped.
        """
        start, state = time.perf_counter(), self.state
        with self.team.inside(f"step {state.steps + 1}"):
            self.refuse_closed()
            self.team.tensors.follow()
            set_process(self.team.rank_here, self.stages.states, state.steps + 1)
            self.averages.refuse_applied("train")
            self.stages.refuse_whole("train")
            refuse_training_here()
            self._modes.refuse_other_mode()
            self.stages.ensure_equal_values()
            self.stages.tied.follow()
            pieces = self._cutter.cut(batch)
            self._written.add(batch)
            ready = Batch(self.prepared, pieces, self.plan.microbatches, self.team, self.queues)
            if ready.remark is not None and state.steps and self.team.first:
                warn_caller(ready.remark)
            self.stages.clamp(ready.captured)
            with naming_difference(self._shape, pieces):
                scale = self._run(ready, self.checks.options(options))
            self.checks.check_last()  # of the step before: meanwhile the device has this one to run
            self.stages.tied.note()
            self.team.tensors.publish_gradients()
            state.steps, state.visits, state.metrics = state.steps + 1, 0, ready.metrics()
            if options.update and not state.skipped:
                state.updates += 1
                self.averages.update()
            self.checks.check(ready, options.update, self._outcome(options.update), self._update, scale, start)
        return ready

    def _run(self, batch: Batch, options: StepOptions) -> float | None:
        """Run a batch on the devices, with its update or the accumulation of its gradients.

        Returns:
            The factor of its loss; None without loss scaling.
        """
        state, team, prepared = self.state, self.team, batch.prepared
        if state.accumulated is not None and state.accumulated.kept is not None:
            try:
                state.accumulated.kept.refuse_cleared()
            except RequestError:
                state.accumulated = None
                raise
        samples = sum(piece.shape.samples for piece in batch.pieces)
        before = state.accumulated or Accumulated(samples, 0.0, self._loss_scale.now() if self._loss_scale else None)
        counted, needs_finite = self._counted(prepared), self.training.needs_finite_loss
        size = 1.0 if counted else samples / before.samples

        def before_update(device: int) -> None:
            executor = self.workers.executor(device)
            if options.update:
                divisor, scales, refused = self._divisor(batch, device, before, size)
                executor.finish_reductions()
                if needs_finite and not (batch.loss_is_finite(device) and before.finite):
                    refused = True
                executor.update.begin(divisor, before.scale, scales, refused)

        def after(device: int) -> None:
            replicas = team.replicas_of(device)
            if replicas is not None:
                broadcast_from_first(self._written_buffers(prepared, device), replicas)

        inputs = self._inputs(batch, size, before.scale)
        try:
            self.workers.run(batch, inputs, options, self._outcome(options.update), before_update, after)
        except BaseException:
            state.accumulated = None
            raise
        finite = before.finite and (not needs_finite or bool(torch.isfinite(batch.loss)))
        state.accumulated = None
        if options.update:
            update = self._update
            state.norm, state.skipped = update.norm, not finite or update.overflow
            if self._loss_scale is not None:
                self._loss_scale.update(update.overflow)
        else:
            here = math.fsum(row[WEIGHT] for row in batch.own) if counted else size
            kept = KeptGradients(self.stages.states)
            state.accumulated = Accumulated(before.samples, before.divisor + here, before.scale, finite, kept)
        return before.scale

    @property
    def _update(self) -> Update:
        """The update of the first device of this process."""
        return self.workers.executor(self.team.local[0]).update

    def _outcome(self, update: bool) -> str:
        """The state of the model after a step that is refused at its end, for the message."""
        if update and any(queue.runs_ahead for queue in self.queues.values()):
            return "updates were made with them: go on from a checkpoint"
        return NOT_UPDATED

    def _counted(self, prepared: Prepared) -> bool:
        """Whether microbatches count by absolute weights: the step's own, or samples with replicas; else by shares."""
        return prepared.weighted or self.team.replicas > 1

    def _divisor(
        self, batch: Batch, device: int, before: Accumulated, size: float
    ) -> tuple[Tensor | float, tuple[Tensor, int] | None, bool]:
        """What the update of the accumulated gradients needs.

        Args:
            size: relative size of this batch, if weights are shares.

        Returns:
            The divisor of the gradients; the sum of the replicas' loss scales and the number of replicas; and whether
            the update is refused on all replicas.
        """
        differ = batch.agreement.differ()
        if not self._counted(batch.prepared):
            return before.divisor + size, None, differ
        # The sum of computed weights is known after the last microbatch.
        total = batch.total_weight(device)
        if before.divisor:
            total = before.divisor + (total.double() if isinstance(total, Tensor) else total)
        replicas = self.team.replicas_of(device)
        if replicas is None:
            return total, None, differ
        queue = self.queues[device]
        summed, scales, apart = sum_over_replicas([total, before.scale or 0.0, float(differ)], replicas, queue)
        mean: Tensor = summed / (1 if batch.prepared.weighted else self._samples())
        refused = not queue.runs_ahead and bool(apart)
        return mean, None if before.scale is None else (scales, replicas.devices), refused

    def _inputs(self, batch: Batch, size: float, scale: float | None) -> StepInputs:
        prepared, pieces = batch.prepared, batch.pieces
        first = self.team.batch * self.plan.microbatches
        self.team.tensors.check(prepared.compiled)
        keys = prepared.keys(self.state.seed, self.state.steps, first)
        weights = [row[WEIGHT] for row in prepared.parts]
        samples = self._samples()
        shares = [
            weight if isinstance(weight, float) else weight_of(piece, self.team.replicas) / samples
            for weight, piece in zip(weights, pieces, strict=True)
        ]
        seeds = torch.tensor(shares, dtype=prepared.loss_dtype)
        if size != 1:
            seeds *= size
        factor = None if scale is None else torch.tensor(scale, dtype=prepared.loss_dtype)
        if factor is not None:
            seeds *= factor
        return StepInputs(pieces, keys, seeds, prepared.weights, factor, clear_gradients=self.state.accumulated is None)

    def _samples(self) -> float:
        """The total that weights are divided by: with replicas the samples of a step with the largest microbatches.

        All ranks know this number without communication. The division by the real total follows in the update.
        """
        if self.team.replicas == 1:
            return 1.0
        return float(self.team.replicas * self.plan.microbatches * self._shape.samples)

    def _written_buffers(self, prepared: Prepared, device: int) -> list[Tensor]:
        """The buffers that the stages of a device write."""
        written = prepared.compiled[0].operators.step.mutated_buffers
        states = [self.stages.states[stage.index] for stage in self.plan.stages_on(device)]
        return [buffer for state in states for name, buffer in state.buffers.items() if name in written]

    def evaluate(self, batch: Any, forwards: ForwardFunction, trace: bool = False) -> Batch:
        """Run a function forward only.

        Args:
            forwards: the function, and what it returns.
            trace: whether every action is recorded.
        """
        method = "forward" if forwards.rows else "evaluate"
        # What is allocated here may live on, and a step cannot train with tensors of the caller's inference mode.
        with self.team.inside(method), torch.inference_mode(False), self.evaluator.parameters():
            self.refuse_closed()
            self.checks.check_last()
            self.team.tensors.follow()
            forwards = evolve(forwards, function=self.team.tensors.step_of(forwards.function))
            self.stages.ensure_equal_values()
            self.stages.tied.follow()
            done = self.evaluator.run(forwards, self._cutter.cut(batch, forwards.function), trace)
            if done.remark is not None and self.team.first:
                warn_caller(done.remark)
            if not forwards.rows:
                self.state.metrics = done.metrics()
        return done

    def gathered_trace(self, batch: Batch) -> Trace:
        """The trace of all devices for a traced batch; all ranks call this together."""
        if batch.trace is not None:
            return batch.trace
        ahead_ns = self.team.clock_offset_ns()  # of the clock of the first process
        records = self.team.everywhere(lambda device: batch.records[device].earlier(ahead_ns))
        return measured_trace(batch.prepared.plan, records)

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The optimizers of this process, by stage; stages without one are omitted."""
        self.stages.ensure_values()
        return {index: state.optimizer for index, state in self.stages.states.items() if state.optimizer is not None}

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group in the next update: of the first stage with an optimizer."""
        first = next(iter(self.optimizers.values()), None) or self._rates_without_parameters()
        return [float(group["lr"]) for group in first.param_groups if "lr" in group] if first is not None else []

    def _rates_without_parameters(self) -> Optimizer | None:
        """An optimizer of empty parameters in place of all, whose scheduler has stepped as often as those of other
        processes: for a process whose stages have no parameters."""
        training, steps = self.training, self.state.updates
        if training.optimizer is None:
            return None
        if self._rates is None or self._rates[0] > steps:
            names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
            new = stage_optimizer(training.optimizer, [(name, nn.Parameter(torch.empty(0))) for name in names])
            make = training.scheduler
            self._rates = 0, new, None if new is None or make is None else stage_scheduler(make, new)
        done, made, scheduler = self._rates
        if made is not None and scheduler is not None:
            for _ in range(steps - done):
                made.step()
                scheduler.step()
        self._rates = steps, made, scheduler
        return made

    def save(self, folder: str | Path, frozen: bool = True) -> None:
        """Write parameters and persistent buffers; see `Pipeline.save`."""
        self.refuse_closed()
        self.checks.check_last()
        with self.team.inside("save"):
            self.stages.ensure_equal_values()
            with self.stages.whole_parameters():
                save_checkpoint(Path(folder), self.model, self.team, frozen)

    def close(self) -> None:
        """Close threads and connections."""
        if not self.closed:
            self.checks.close()
        self.closed = True
        for each in self.offloads.values():
            each.close()
        self.team.close()

    def refuse_closed(self) -> None:
        """Raise a RequestError after `close`, and in a fork."""
        if os.getpid() != self._pid:
            raise RequestError(
                f"this process is a fork of process {self._pid}, whose pipeline it is: its threads and connections do "
                "not exist here; use the pipeline in that process alone"
            )
        if self.closed:
            raise RequestError("the pipeline is closed: call close() after the last step, or build another pipeline")

    def _follow_model(self) -> None:
        """Apply changes of the model between steps to the stages."""
        steps = self.state.steps
        when = f"between steps {steps} and {steps + 1}" if steps else "before the first step"
        if self.stages.follow_model(when):
            self.prepared.forget()
