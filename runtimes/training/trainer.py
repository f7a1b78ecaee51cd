"""Training and evaluation by a plan, batch by batch, on the devices of this process; `Pipeline` is the public class.

example, plan, team ──▶ LocalStages (parameters, buffers, optimizers) ──▶ Workers
                   └──▶ Variants (prepared steps by shape) ─────────────────┐
batch ──▶ microbatches ──▶ StepRunner or Evaluator ◀────────────────────────┘ ──▶ loss, metrics, trace, counts
"""

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...core.capture.python.refusals import refuse_training_here
from ...core.costs.message_overhead import MessageTimes
from ...core.errors import RequestError
from ...core.logs import set_process
from ...core.plan.plan import Plan
from ...core.trace.trace import Trace
from ..batch.difference import naming_difference
from ..batch.example import Example
from ..batch.microbatches import BatchCutter, Microbatch, WrittenBatches
from ..batch.modes import ModuleModes
from ..engine.clocked import Clock
from ..engine.step_data import StepOptions, StepRecord
from ..engine.tracing import measured_trace, message_times
from ..launch.team import Team
from ..lazy_value import LazyValue
from ..monitor.monitors import Monitor
from ..offload.tier import OffloadTier
from ..optimizer.optimizers import stage_optimizer, stage_scheduler
from ..optimizer.training import Training
from ..optimizer.update import Ending
from ..programs.options import ProgramOptions
from ..weights.saving import save_checkpoint
from .averages import Averages, visit_parameters
from .batch_run import BatchResult, BatchRun
from .counts import Counts
from .evaluation import ForwardFunction
from .monitoring import UpdateNumbers
from .plan_setup import PlanSetup, set_up_plan
from .step_checks import StepChecks


class Trainer:
    """Trains and evaluates a model by a plan.

    Args:
        example: the user's model and step, captured for the largest microbatch; the microbatch is not kept.
        plan: a valid plan, with SYNC if ``training`` needs all stages at once.
        team: the devices.
        training: optimizer, clipping, scaling and seed.
        programs: how stage programs are derived.
        clock: runs virtual devices; None for real ones.
        offload: where offloaded saved tensors go; None for the host's memory.
        monitors: the user's functions that are called with the numbers of each step.

    Attributes:
        model, step, plan, team, training: as given.
        optimizers_lent: whether the caller may hold the optimizers of stages.
        stages: parameters, buffers and optimizers of the stages in this process.
        variants: the prepared steps.
        runner: runs training steps.
        evaluator: runs forwards.
        queues: device of this process → its compute queue.
        averages, checks: of the weights, and of steps.
        offloads: device of this process → its copies of saved tensors to the host.
        counts: steps and updates so far.
        norm: the global norm of the last update's gradients; None without ``clip_norm``.
        skipped: whether the last update was skipped because a gradient or the loss was not finite.
        trace: of the last traced step; None if there is none.
        closed: whether it was closed.
        trained_elements: number of elements of the tensors of the last batch that was trained on.
    """

    def __init__(
        self,
        example: Example,
        plan: Plan,
        team: Team,
        training: Training,
        programs: ProgramOptions,
        clock: Clock | None = None,
        offload: OffloadTier | None = None,
        monitors: Sequence[Monitor] = (),
    ) -> None:
        model = example.model
        self.model, self.step, self.team, self.training = model, example.step, team, training
        self._rates: tuple[int, Optimizer | None, LRScheduler | None] | None = None
        self.optimizers_lent = False
        self.closed, self.counts, self._pid = False, Counts(), os.getpid()
        self._metrics = LazyValue[dict[str, float]](dict)
        self.norm: Tensor | None = None
        self.skipped = False
        self.trace: Trace | None = None
        self._shape = example.shape
        self.trained_elements = 0
        self._cutter = BatchCutter(example.shape, plan.microbatches)
        places = example.operators.step.batch_writes
        self._written = WrittenBatches({example.shape.nesting.names[place]: line for place, line in places.items()})
        self._on_devices = partial(
            set_up_plan, team=team, training=training, follow_model=self._follow_model, clock=clock, offload=offload
        )
        self.adopt(self._on_devices(example, plan, programs=programs))
        self._scaler = training.scaler if training.scaler is not None and training.scaler.is_enabled() else None
        self.checks = StepChecks(training, monitors, self.stages, self.queues, self._scaler is not None)
        self._modes = ModuleModes(model if team.tensor is None else team.tensor.model)
        whole = lambda: self.stages.whole_parameters()  # noqa: E731,PLW0108 - another plan has other stages
        self.averages = Averages(model, self.stages.states, self.save, self.refuse_closed, whole)

    def set_up_plan(self, example: Example, plan: Plan, programs: ProgramOptions) -> PlanSetup:
        """The parts that depend on the plan, for another plan; nothing is changed."""
        return self._on_devices(example, plan, programs=programs)

    def adopt(self, parts: PlanSetup) -> None:
        """Train by the plan of these parts from now on."""
        self.plan, self.stages, self.variants = parts.plan, parts.stages, parts.variants
        self.runner, self.evaluator = parts.runner, parts.evaluator
        self.offloads, self.queues = parts.offloads, parts.queues

    def follow(self, plan: Plan) -> None:
        """Train by another plan of the same stages from now on."""
        self.plan = self.stages.plan = plan

    def replace(self, parts: PlanSetup) -> None:
        """Train by another plan from now on; its stages have no values yet."""
        for each in self.offloads.values():
            each.memory.close()
        self.adopt(parts)
        self.checks.follow(parts.stages, parts.queues)

    def train(self, batch: Any, options: StepOptions) -> tuple[Tensor, BatchResult]:
        """Run one step, and count it.

        Args:
            batch: a whole batch.
            options: how it runs.

        Returns:
            The loss over all replicas, and the result of the batch.

        Raises:
            NonFiniteError: the loss or the global norm is not finite, and ``on_nonfinite`` is ``"raise"``.
        """
        with self.team.inside(f"step {self.counts.steps + 1}"):
            return self._train(batch, options)

    def _train(self, batch: Any, options: StepOptions) -> tuple[Tensor, BatchResult]:
        start = time.perf_counter()
        self.refuse_closed()
        tensor = self.team.tensor
        if tensor is not None:
            tensor.linked.follow()
        self._log_position(self.counts.steps + 1)
        self.averages.refuse_applied("train")
        self.stages.refuse_whole("train")
        refuse_training_here()
        self._modes.refuse_other_mode()
        self.stages.ensure_equal_values()
        self.stages.tied.follow()
        ready = self.runner.batch(self._pieces(batch))
        if ready.remark is not None and self.counts.steps and self.team.first:
            warnings.warn(ready.remark, stacklevel=4)
        self._clamp(ready)
        self.trained_elements = sum(t.numel() for piece in ready.pieces for t in piece.leaves if isinstance(t, Tensor))
        scale = None if self._scaler is None else float(self._scaler.get_scale())
        with naming_difference(self._shape, ready.pieces):
            done = self.runner.run(ready, self.counts.steps, self.checks.options(options))
        self.checks.check_last()  # of the step before: meanwhile the device has this one to run
        assert done.loss is not None
        self.stages.tied.note()
        if tensor is not None:
            tensor.linked.publish_gradients()
        self.counts.steps, self.counts.visits = self.counts.steps + 1, 0
        if options.ending is Ending.STEP:
            self.norm, self.skipped = self.runner.norm, self.runner.skipped
            self.counts.updates += not self.skipped
            if not self.skipped:
                self.averages.update()
        self._metrics = done.metrics
        self.trace = done.trace or self.trace
        numbers = UpdateNumbers(self.counts.steps, options.ending is Ending.STEP, self.skipped, self.norm, scale)
        self.checks.check(ready, done, options.ending, self.runner, numbers, start)
        return done.loss, done

    def _clamp(self, ready: BatchRun) -> None:
        """Limit the parameters that the step limits; see `CapturedStep.clamps`."""
        clamps = ready.prepared.compiled[0].operators.step.clamps

        def limit(name: str, parameter: Tensor) -> None:
            for method, limits in clamps.get(name, ()):
                getattr(parameter, method)(*limits)

        if clamps:
            with self.stages.whole_parameters():
                visit_parameters(self.model, self.stages.states, limit, ())

    def _pieces(self, batch: Any) -> list[Microbatch]:
        """The microbatches of a batch to train on."""
        pieces = self._cutter.cut(batch)
        self._written.add(batch)
        return pieces

    def _log_position(self, step: int) -> None:
        set_process(self.team.rank_here, self.stages.states, step)

    def evaluate(self, batch: Any, forwards: ForwardFunction, trace: bool = False) -> BatchResult:
        """Run a function forward only.

        Args:
            batch: a whole batch.
            forwards: the function, and what it returns.
            trace: whether every action is recorded.
        """
        with self.team.inside("forward" if forwards.rows else "evaluate"), self.evaluator.parameters():
            return self._evaluate(batch, forwards, trace)

    def _evaluate(self, batch: Any, forwards: ForwardFunction, trace: bool) -> BatchResult:
        self.refuse_closed()
        self.checks.check_last()
        tensor = self.team.tensor
        if tensor is not None:
            tensor.linked.follow()
            forwards = evolve(forwards, function=tensor.step_of(forwards.function))
        self.stages.ensure_equal_values()
        self.stages.tied.follow()
        ready = self.evaluator.batch(forwards, self._cutter.cut(batch, forwards.function))
        self._clamp(ready)
        done = self.evaluator.run(ready, trace)
        if ready.remark is not None and self.team.first:
            warnings.warn(ready.remark, stacklevel=4)
        self._metrics = done.metrics if done.loss is not None else self._metrics
        self.trace = done.trace or self.trace
        return done

    def gathered_trace(self, done: BatchResult) -> Trace:
        """The trace of all devices for a traced batch; all ranks call this together."""
        self.trace = done.trace or measured_trace(done.plan, self._gather(done.records))
        return self.trace

    def measured_step(self, done: BatchResult) -> tuple[Trace, MessageTimes]:
        """The same, and the times that messages took the devices; `trace` stays."""
        records = self._gather(done.records)
        return measured_trace(done.plan, records), message_times(records)

    @property
    def metrics(self) -> dict[str, float]:
        """The other parts of the step's result for the last batch. On CUDA the host waits for them."""
        return self._metrics()

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The optimizers of this process, by stage; stages without one are omitted."""
        self.stages.ensure_values()
        return {index: state.optimizer for index, state in self.stages.states.items() if state.optimizer is not None}

    def rates_without_parameters(self) -> Optimizer | None:
        """An optimizer of stand-ins for all parameters, whose scheduler has stepped as often as those of other
        processes: for a process whose stages have no parameters."""
        training, steps = self.training, self.counts.updates
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
        with self.team.inside("save"), self.stages.whole_equal_parameters():
            save_checkpoint(Path(folder), self.model, self.team, frozen)

    def close(self) -> None:
        """Close threads and connections."""
        if not self.closed:
            self.checks.close()
        self.closed = True
        for each in self.offloads.values():
            each.memory.close()
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
        steps = self.counts.steps
        when = f"between steps {steps} and {steps + 1}" if steps else "before the first step"
        if self.stages.follow_model(when):
            self.variants.forget()

    def _gather(self, records: Mapping[int, StepRecord]) -> list[StepRecord]:
        """The records of all devices, on the clock of the first process."""
        ahead_ns = self.team.clock_offset_ns()
        return self.team.everywhere(lambda device: records[device].earlier(ahead_ns))
