"""Training and evaluation by a plan, batch by batch, on the devices of this process; `Pipeline` is its public face.

example, plan, team ──▶ LocalStages (parameters, buffers, optimizers) ──▶ Workers
                   └──▶ Variants (prepared steps by shape) ─────────────────┐
batch ──▶ microbatches ──▶ StepRunner or Evaluator ◀────────────────────────┘ ──▶ loss, metrics, trace, counts
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve
from torch import Tensor

from ...core.capture.export.captured import CapturedStep
from ...core.capture.export.carry_over import cut_of
from ...core.capture.export.step import capture_step
from ...core.capture.python.surroundings import refuse_no_grad
from ...core.errors import RequestError
from ...core.logs import set_process
from ...core.plan.messages import sending_pairs
from ...core.plan.plan import Plan
from ...core.trace.trace import Trace
from ..batch.example import Example
from ..batch.microbatches import BatchCutter
from ..batch.modes import ModuleModes
from ..batch.remote_tensors import as_meta_tensors
from ..batch.shapes import Shapes
from ..devices.compute import compute_device
from ..engine.clocked import Clock
from ..engine.prepared import PreparedSteps
from ..engine.step_data import StepOptions, StepRecord
from ..engine.tracing import measured_trace, message_times
from ..engine.transport import check_transport
from ..engine.workers import Workers
from ..launch.team import Team
from ..monitor.monitoring import Monitoring, UpdateNumbers
from ..monitor.monitors import Monitor
from ..offload.offloads import offloads
from ..offload.tier import OffloadTier
from ..optimizer.training import Training
from ..optimizer.update import Ending, NormParameters
from ..planning.rehearsed import Rehearsal
from ..profile.reference_workload import PASSES, passes_around, reference_s
from ..programs.compiled import compile_stages
from ..programs.options import ProgramOptions
from ..weights.saving import save_checkpoint
from .averages import Averages
from .batch_run import BatchResult, BatchRun
from .counts import Counts
from .evaluation import Evaluator, Forwards
from .local_stages import LocalStages
from .non_finite import LossCheck
from .steps import StepRunner
from .variants import Variants


class Trainer:
    """Trains and evaluates a model by a plan.

    Args:
        example: the user's model and step, captured for the largest microbatch; the microbatch is not kept.
        plan: a valid plan, with SYNC if ``training`` needs all stages at once.
        team: the devices.
        training: optimizer, clipping, scaling and seed.
        programs: how stage programs are derived.
        clock: runs virtual devices; None for real ones.
        offload: where saved tensors go that leave their device; None for the host's memory.
        monitors: the user's functions that are called with the numbers of each step.

    Attributes:
        model, step, plan, team: as given.
        stages: parameters, buffers and optimizers of the stages in this process.
        variants: the prepared steps.
        runner: runs training steps.
        evaluator: runs forwards.
        averages: of the weights.
        offloads: device of this process → its copies of saved tensors to the host.
        counts: steps and updates so far.
        metrics: the other parts of the step's result for the last batch.
        norm: the global norm of the last update's gradients; None without ``clip_norm``.
        skipped: whether the last update was skipped because a gradient was not finite.
        trace: of the last traced step; None if there is none.
        closed: whether it was closed.
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
        model, shape, operators = example.model, example.shape, example.operators
        self.model, self.step, self.plan, self.team = model, example.step, plan, team
        self.closed, self.counts = False, Counts()
        self.metrics: dict[str, float] = {}
        self.norm: Tensor | None = None
        self.skipped = False
        self.trace: Trace | None = None
        self._cutter = BatchCutter(model, self.step, shape, plan.microbatches)
        local = [s.index for s in plan.stages if s.device in team.local]
        device = compute_device([*model.parameters(), *model.buffers()])
        where = team.where = team.where or dict.fromkeys(team.local, device)
        on = {i: where[plan.placement[i]] for i in local}
        limit, compiler, known = programs.max_shapes, programs.compiler, programs.known
        first = compile_stages(operators, [stage.nodes for stage in plan.stages], local, on, compiler, known)
        check_transport(team.kind, plan, first.layout, dict(model.named_parameters()), where)
        team.connect(sending_pairs(plan))
        kind = next(iter(where.values())).type
        cut = cut_of(first.operators, first.stages)
        self.stages = stages = LocalStages(model, plan, team, first, on, training)

        def variant() -> tuple[Shapes, PreparedSteps]:
            shapes = Shapes(lambda batch, _: self._captured(batch, kind), team, cut, on, limit, compiler)
            return shapes, PreparedSteps(plan, shapes, stages.states, model)

        self.variants = Variants(model, self.step, variant, self._follow_model)
        self.variants.shapes.keep(shape, first)
        largest = shape.samples if team.replicas > 1 else 0
        norm_parameters = NormParameters.of(plan, dict(model.named_parameters()))
        self.offloads = offloads(plan, first, team, where, offload or OffloadTier())
        workers = Workers(plan, stages.states, team, where, training, norm_parameters, clock, self.offloads)
        self.runner = StepRunner(stages, self.variants, workers, training, largest)
        self.evaluator = Evaluator(stages, cut, workers, training, programs, self._follow_model)
        self._check = LossCheck(training.on_nonfinite, stages)
        self._monitoring = Monitoring(monitors, stages, workers.queues)
        self._scaler = training.scaler if training.scaler is not None and training.scaler.is_enabled() else None
        self._modes = ModuleModes(model)
        self.averages = Averages(model, stages.states, self.save, self.refuse_closed)

    def train(self, batch: Any, options: StepOptions) -> tuple[Tensor, BatchResult]:
        """Run one step, and count it.

        Args:
            batch: a whole batch.
            options: how it runs.

        Returns:
            The loss over all replicas, and the result of the batch.

        Raises:
            NonFiniteError: the loss is not finite, and ``on_nonfinite`` is ``"raise"``.
        """
        with self.team.inside(f"step {self.counts.steps + 1}"):
            return self._train(batch, options)

    def _train(self, batch: Any, options: StepOptions) -> tuple[Tensor, BatchResult]:
        start = time.perf_counter()
        self.refuse_closed()
        self._log_position(self.counts.steps + 1)
        self.averages.refuse_applied("train")
        refuse_no_grad()
        self._modes.refuse_others()
        if options.ending is not Ending.REDUCE:
            self.stages.have_equal_values()
            self.stages.tied.follow()
        ready = self.runner.batch(self._cutter.cut(batch))
        if ready.remark is not None and self.counts.steps and self.team.first:
            warnings.warn(ready.remark, stacklevel=4)
        scale = None if self._scaler is None else float(self._scaler.get_scale())
        if options.ending is not Ending.REDUCE:
            options = self._monitoring.options(options)
        done = self.runner.run(ready, self.counts.steps, evolve(options, peaks=self._check.on))
        assert done.loss is not None
        self.stages.tied.note()
        self.counts.steps, self.counts.visits = self.counts.steps + 1, 0
        if options.ending is Ending.STEP:
            self.norm, self.skipped = self.runner.norm, self.runner.skipped
            self.counts.updates += not self.skipped
            if not self.skipped:
                self.averages.update()
        self.metrics = done.metrics
        self.trace = done.trace or self.trace
        if options.ending is not Ending.REDUCE:
            self._after_step(ready, done, options.ending, scale, time.perf_counter() - start)
        return done.loss, done

    def _after_step(
        self, ready: BatchRun, done: BatchResult, ending: Ending, scale: float | None, took_s: float
    ) -> None:
        """Check the loss of a step, and report the step to the monitors."""
        due = ending is Ending.STEP
        failure = self._check.after(done, ready, self.counts.steps, ending, due and not self.skipped)
        if self._monitoring.on:
            numbers = UpdateNumbers(self.counts.steps, due, self.skipped, self.norm, scale)
            self._monitoring.after(done, ready.pieces, took_s, numbers)
        if failure is not None:
            self.runner.drop_accumulated()
            raise failure

    def _log_position(self, step: int) -> None:
        """Set rank, stages and step of log records."""
        set_process(self.team.rank_here, self.stages.states, step)

    def evaluate(self, batch: Any, forwards: Forwards, trace: bool = False) -> BatchResult:
        """Run a function forward only.

        Args:
            batch: a whole batch.
            forwards: the function, and what it returns.
            trace: whether every action is recorded.
        """
        with self.team.inside("forward" if forwards.rows else "evaluate"):
            return self._evaluate(batch, forwards, trace)

    def _evaluate(self, batch: Any, forwards: Forwards, trace: bool) -> BatchResult:
        self.refuse_closed()
        self.stages.have_equal_values()
        self.stages.tied.follow()
        ready = self.evaluator.batch(forwards, self._cutter.cut(batch, forwards.function))
        done = self.evaluator.run(ready, trace)
        if ready.remark is not None and self.team.first:
            warnings.warn(ready.remark, stacklevel=4)
        self.metrics = done.metrics if done.loss is not None else self.metrics
        self.trace = done.trace or self.trace
        return done

    def rehearse(self, batch: Any, steps: int, warm_up: int) -> list[Rehearsal]:
        """Run and record steps that change nothing; see `Pipeline.rehearse`."""
        count, seen, prediction = self.counts.steps, list[Rehearsal](), self.plan.prediction
        passes = PASSES if prediction is None else passes_around(prediction.step_s)
        options = StepOptions(Ending.REDUCE, trace=True)
        with self.stages.rehearsing():
            for _ in range(warm_up):
                self.train(batch, options)
            before = reference_s(self.team, passes) if steps else 0.0
            for _ in range(steps):
                start = time.perf_counter()
                _, done = self.train(batch, options)
                whole_s = self.team.decide(partial(float, time.perf_counter() - start))
                records = self._gather(done.records)
                after = reference_s(self.team, passes)
                around = (before + after) / 2
                seen.append(Rehearsal(measured_trace(done.plan, records), message_times(records), whole_s, around))
                before = after
        self.counts.steps = count
        return seen

    def gathered_trace(self, done: BatchResult) -> Trace:
        """The trace of all devices for a traced batch; all ranks call this together."""
        self.trace = done.trace or measured_trace(done.plan, self._gather(done.records))
        return self.trace

    def save(self, folder: str | Path, frozen: bool = True) -> None:
        """Write parameters and persistent buffers; see `Pipeline.save`."""
        self.refuse_closed()
        with self.team.inside("save"):
            self.stages.have_equal_values()
            save_checkpoint(Path(folder), self.model, self.team, frozen)

    def close(self) -> None:
        """Close threads and connections."""
        if not self.closed:
            self._monitoring.close()
        self.closed = True
        for each in self.offloads.values():
            each.memory.close()
        self.team.close()

    def refuse_closed(self) -> None:
        """Raise a RequestError after `close`."""
        if self.closed:
            raise RequestError("the pipeline is closed: call close() after the last step, or build another pipeline")

    def _follow_model(self) -> None:
        """Apply changes of the model between steps to the stages."""
        steps = self.counts.steps
        when = f"between steps {steps} and {steps + 1}" if steps else "before the first step"
        if self.stages.follow_model(when):
            self.variants.forget()

    def _captured(self, batch: Any, device: str) -> CapturedStep:
        with as_meta_tensors(self.model):
            return capture_step(self.model, self.step, batch, device=device)

    def _gather(self, records: Mapping[int, StepRecord]) -> list[StepRecord]:
        """The records of all devices, on the clock of the first process."""
        ahead_ns = self.team.clock_offset_ns()
        return self.team.everywhere(lambda device: records[device].earlier(ahead_ns))
