"""A pipeline: a plan made ready on its devices, stepped batch by batch."""

import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from attrs import evolve
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.capture.export.captured import CapturedStep
from ..core.capture.export.carry_over import cut_of
from ..core.capture.export.operators import Operators
from ..core.capture.export.step import capture_step
from ..core.capture.programs.programs import StagePrograms
from ..core.capture.python.surroundings import refuse_no_grad
from ..core.capture.regions.breaks import StepFunction
from ..core.errors import PanpipeError, RequestError
from ..core.plan.plan import Plan
from ..core.trace.trace import Trace
from ..core.wording import counted, first_of
from .batch.example import Example
from .batch.microbatches import BatchCutter
from .batch.modes import ModuleModes
from .batch.remote_tensors import as_meta_tensors
from .batch.shapes import Shapes
from .checkpoint.checkpoints import Checkpoints
from .checkpoint.saving import save_checkpoint
from .devices.compute import compute_device
from .engine.clocked import Clock
from .engine.prepared import PreparedSteps
from .engine.step_data import StepOptions, StepRecord
from .engine.tracing import measured_trace, message_times
from .engine.transport import check_transport
from .engine.workers import Workers
from .launch.team import Team
from .optimizer.training import Training
from .optimizer.update import Ending, NormParameters
from .planning.rehearsed import Rehearsal
from .profile.reference_workload import PASSES, passes_around, reference_s
from .programs.compiled import compile_stages
from .programs.options import ProgramOptions
from .training.averages import AverageFunction, Averages, Visit, WeightAverage, visit
from .training.batch_run import BatchResult
from .training.counts import Counts
from .training.evaluation import Evaluator, Forwards
from .training.local_stages import LocalStages
from .training.steps import StepRunner
from .training.variants import Variants
from .weights import Weights


class Pipeline:
    """A model that trains as a pipeline.

    Args:
        example: the user's model and step, captured for the largest microbatch; the microbatch is not kept.
        plan: what runs where; validated. Its optimizer steps wait for all stages where ``training`` needs that.
        team: the devices.
        training: how it is trained.
        programs: how stage programs are derived.
        clock: of simulated devices; None for real ones.

    Attributes:
        checkpoints: writes and reads the state of training; `checkpoint`, `resume`, `state_dict` and `load_state_dict`
            are its own.
        skipped: whether the last update was, because a gradient of some stage was not finite and a scaler asks for it.
        metrics: the other parts of the step's result for the last batch, trained on or evaluated.
        scaler: scales losses; the user's own.
        trace: of the last step that was traced; under a clock every step is.
    """

    def __init__(
        self,
        example: Example,
        plan: Plan,
        team: Team,
        training: Training | None = None,
        programs: ProgramOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        training, programs = training or Training(), programs or ProgramOptions()
        model, step, shape, operators = example.model, example.step, example.shape, example.operators
        self._closed, self._counts = False, Counts()
        self._step = step
        self.plan = plan
        self.model = model
        self.metrics: dict[str, float] = {}
        self._norm: Tensor | None = None
        self.skipped = False
        self.scaler = training.scaler
        self.trace: Trace | None = None
        self._team = team
        self._cutter = BatchCutter(model, step, shape, plan.microbatches)
        local = [s.index for s in plan.stages if s.device in team.local]
        device = compute_device([*model.parameters(), *model.buffers()])
        where = team.where = team.where or dict.fromkeys(team.local, device)
        on = {i: where[plan.placement[i]] for i in local}
        limit, compiler, known = programs.max_shapes, programs.compiler, programs.known
        first = compile_stages(operators, [stage.nodes for stage in plan.stages], local, on, compiler, known)
        check_transport(team.kind, plan, first.layout, dict(model.named_parameters()), where)
        kind = next(iter(where.values())).type
        cut = cut_of(first.operators, first.stages)
        self._stages = LocalStages(model, plan, team, first, on, training)
        self._states = self._stages.states

        def variant() -> tuple[Shapes, PreparedSteps]:
            shapes = Shapes(lambda batch, _: self._captured(batch, kind), team, cut, on, limit, compiler)
            return shapes, PreparedSteps(plan, shapes, self._states, model)

        self._variants = Variants(model, step, variant, self._follow_model)
        self._variants.shapes.keep(shape, first)
        largest = shape.samples if team.replicas > 1 else 0
        norm_parameters = NormParameters.of(plan, dict(model.named_parameters()))
        workers = Workers(plan, self._states, team, where, training, norm_parameters, clock)
        self._runner = StepRunner(self._stages, self._variants, workers, training, largest)
        self._evaluator = Evaluator(self._stages, cut, workers, training, programs, self._follow_model)
        self._modes = ModuleModes(model)
        self._averages = Averages(model, self._states, self.save, self._refuse_closed)
        self.checkpoints = Checkpoints(
            self._stages, self._runner, self._evaluator, self._counts, self._averages, self.scaler, team
        )
        self._warn_of_unused(operators)

    def _warn_of_unused(self, operators: Operators) -> None:
        read = set(operators.graph.parameters)
        unused = [n for n, p in self.model.named_parameters() if n not in read and p.requires_grad]
        if unused and self._team.first:
            warnings.warn(
                f"{first_of(unused, 3)}: the loss does not depend on it; it keeps no gradient, as in eager",
                stacklevel=4,
            )

    def step(self, batch: Any, *, update: bool = True) -> Tensor:
        """Train on one batch: forward, backward, reduction and optimizer step.

        Args:
            batch: a whole batch, as the example was; every rank of a replica passes the same one.
            update: False keeps the gradients for a later batch, whose update takes the mean over all of them: of
                samples, or of the step's own weights.

        Returns:
            The loss over all replicas, a scalar tensor, on every rank. Other parts of the step's result are in
            ``metrics``.

        Raises:
            RequestError: the batch does not fit the plan.
            WorkerError: a worker stopped.
        """
        return self._run(batch, StepOptions(Ending.STEP if update else Ending.KEEP))[0]

    def trace_step(self, batch: Any) -> tuple[Tensor, Trace]:
        """Train on one batch and record what every local device did, and after it how fast the machine is.

        Returns:
            The loss, and the trace of all devices, on every rank.
        """
        loss, done = self._run(batch, StepOptions(Ending.STEP, trace=True, watch=True))
        trace = self._traced(done)
        if done.trace is None:  # devices that take the time they take
            trace = self.trace = evolve(trace, reference_s=reference_s(self._team))
        return loss, trace

    def reference_s(self) -> float:
        """Seconds that the reference workload takes now, on all devices at once (see `reference_workload`); the same on
        every rank, and all of them call this together. Over what ``plan.prediction.reference_s`` says, it is how much
        slower the machine has become since its plan was measured."""
        return reference_s(self._team)

    def evaluate(self, batch: Any) -> Tensor:
        """The step's loss for a batch, forward only.

        As in plain PyTorch under ``torch.no_grad()``, modules compute in the mode that they are in: call
        ``model.eval()`` before, and ``model.train()`` behind. For a mode the step is captured again, once.
        Nothing is saved and nothing changes: no parameter, gradient, optimizer or count, no buffer in whatever mode,
        and no random number of a later step. Gradients that wait for an update (``update=False``) go on waiting.

        Args:
            batch: a whole batch, as for ``step``; of any size and shapes.

        Returns:
            The loss over all replicas, a scalar tensor, on every rank. Other parts of the step's result are in
            ``metrics``.

        Raises:
            RequestError: the batch does not fit the plan, or ranks are in different modes.
            WorkerError: a worker stopped.
        """
        done = self._evaluated(Forwards(self._step), batch)
        assert done.loss is not None
        return done.loss

    def trace_evaluation(self, batch: Any) -> tuple[Tensor, Trace]:
        """Evaluate and record what every local device did: F and its messages alone.

        Returns:
            The loss, and the trace of all devices, on every rank.
        """
        done = self._evaluated(Forwards(self._step), batch, trace=True)
        assert done.loss is not None
        return done.loss, self._traced(done)

    def forward(self, batch: Any, function: StepFunction, *, everywhere: bool = True) -> Any:
        """What a function returns for a batch, forward only: logits, features, what is generated from them.

        Args:
            batch: a whole batch: any nesting of tensors, the step's or without what the function does not read.
            function: ``function(model, microbatch)``, which returns any nesting of tensors with a row for each sample
                along one dimension, and None; it is captured once for every mode, as by ``evaluate``. Define it once:
                one that is made anew for every batch is captured for every batch.
            everywhere: whether every rank of a replica gets the results, sent to it by the ranks that compute them;
                False leaves them there, and None in the place of what is computed elsewhere.

        Returns:
            The results nested as the function returns them, those of microbatches joined in order; without gradients.
            With replicas those of this replica's batch.

        Raises:
            RequestError: the function returns a scalar, a number or other things without a row for each sample, or
                cannot be captured, or needs what no stage holds.
            WorkerError: a worker stopped.
        """
        if not callable(function):
            raise RequestError(f"function is {function!r}: give a function of model and batch that returns tensors")
        return self._evaluated(Forwards(function, True, everywhere), batch).rows

    @property
    def grad_norm(self) -> float | None:
        """The global 2-norm of the last update's gradients, before clipping; None without ``clip_norm``.

        On a GPU whoever asks waits for the step; who does not lets the host run ahead.
        """
        return None if self._norm is None else self._norm.item()

    @property
    def steps(self) -> int:
        """Batches so far; another number continues with the random numbers of that step."""
        return self._counts.steps

    @steps.setter
    def steps(self, number: int) -> None:
        self._counts.steps = number

    @property
    def updates(self) -> int:
        """Optimizer steps so far; those that were skipped do not count."""
        return self._counts.updates

    @property
    def programs(self) -> dict[int, StagePrograms]:
        """Programs of the stages in this process, for the shape of microbatch used last."""
        return self._variants.shapes.latest.programs

    @property
    def stage_parameters(self) -> dict[int, dict[str, nn.Parameter]]:
        """Parameters of the stages in this process, by stage and qualified name."""
        return {index: state.parameters for index, state in self._states.items()}

    def load(self, weights: Weights) -> None:
        """Give this process's stages their values, and let go of the parameters that other processes own.

        What is left of those in the user's model is meta tensors. A parameter that no stage reads stays with the first
        device.

        Args:
            weights: where values come from, for what is on meta; a checkpoint has them for everything.
        """
        self._stages.load(weights)

    def save(self, folder: str | Path) -> None:
        """Write parameters and persistent buffers as a checkpoint: a safetensors file per process, and their index.

        ``weights=folder`` reads it again, whatever the plan then, and so does transformers, with the model's
        ``config.json`` beside it. A tied weight is written once, under its first name. Every rank calls this.

        Args:
            folder: one that all ranks see; made if it is not there. A checkpoint of as many processes is replaced.

        Raises:
            RequestError: something cannot be written there.
        """
        self._refuse_closed()
        self._stages.have_values()
        save_checkpoint(Path(folder), self.model, self._team)

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The optimizers of this process, by stage; stages without one are omitted.

        For schedulers that ``scheduler=`` does not support: create one for each optimizer, and step them on every rank.
        """
        self._stages.have_values()
        return {index: state.optimizer for index, state in self._stages.states.items() if state.optimizer is not None}

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group in the next update.

        The groups are those of this process's first stage with an optimizer; empty if there is none.
        """
        first = next(iter(self.optimizers.values()), None)
        return [float(group["lr"]) for group in first.param_groups if "lr" in group] if first is not None else []

    def ema(
        self, decay: float = 0.999, *, buffers: bool = False, function: AverageFunction | None = None
    ) -> WeightAverage:
        """Keep an average of the weights, updated after every optimizer step. Every rank calls this.

        Each process averages what it holds. The average starts with the current values, and skipped updates do not
        change it. Later checkpoints contain it, and `resume` reads it if ``ema()`` was called before. Its ``applied()``
        is a context in which the model computes with it, for evaluation; its ``save(folder)`` writes it.

        Args:
            decay: the average becomes ``average.lerp_(parameter, 1 - decay)``.
            buffers: whether buffers are averaged, too; otherwise the model's buffers are used.
            function: ``function(average, parameter, updates)`` returns the new average: ``avg_fn`` of
                ``torch.optim.swa_utils.AveragedModel``, in place of ``decay``.

        Raises:
            RequestError: decay is not a number from 0 to 1, or function is not callable.

        Example:
            >>> ema = pipe.ema(0.999)  # doctest: +SKIP
            >>> with ema.applied():  # doctest: +SKIP
            ...     loss = pipe.evaluate(batch)
        """
        self._refuse_closed()
        self._stages.have_values()
        return self._averages.add(decay, buffers, function)

    def on_parameters(self, function: Visit) -> dict[str, Any]:
        """Call a function with every parameter, in each process that holds it. Every rank calls this.

        It replaces a loop over ``model.parameters()`` between steps: clipping of weights, noise, statistics. The
        function may change parameters in place; their gradients are in ``grad``. Processes that hold a tied weight, and
        replicas, call it with the same value and the same random numbers, and it must make the same changes there.

        Args:
            function: ``function(name, parameter)``, called under ``no_grad``.

        Returns:
            Name → result, for the parameters that this process holds.
        """
        self._refuse_closed()
        self._stages.have_values()
        self._counts.visits += 1
        key = self._runner.seed, self._counts.steps, self._counts.visits
        return visit(self.model, self._states, function, key)

    def state_dict(self) -> dict[str, Any]:
        """The state needed to resume training, as far as this process holds it.

        It has weights, buffers, the state of optimizers, schedulers and a scaler, and the counters that the random
        numbers depend on, by the model's own names. With `load_state_dict` it makes a pipeline ``Stateful`` for
        ``torch.distributed.checkpoint``, as in ``dcp.save({"pipe": pipe}, checkpoint_id=folder)``; ``dcp.load`` reads
        the same files under another plan.
        Tensors are not copied. Names of the optimizer's state are those of ``torch.distributed.checkpoint.state_dict``
        with ``flatten_optimizer_state_dict=True``.

        Raises:
            RequestError: gradients of several batches wait for their update, or the optimizer has state that belongs to
                no parameter.
        """
        return self.checkpoints.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`, of this pipeline or, if one process holds everything, of another one.

        Gradients are cleared. The caller skips the batches of the steps so far; ``steps`` is their number.

        Args:
            state_dict: with everything that this process holds, or more.

        Raises:
            RequestError: it is of another model or optimizer, or is incomplete; nothing is changed then.
        """
        self.checkpoints.load_state_dict(state_dict)

    def checkpoint(self, folder: str | Path) -> None:
        """Write a checkpoint of training with ``torch.distributed.checkpoint``. Every rank calls this.

        Args:
            folder: one that all ranks can access, for this checkpoint alone; created if it does not exist.

        Raises:
            RequestError: there is a checkpoint already, or it cannot be written; see also `state_dict`.
        """
        self._refuse_closed()
        self.checkpoints.write(folder)

    def resume(self, folder: str | Path) -> None:
        """Resume from a checkpoint, written under any plan by any number of processes. Every rank calls this.

        With the same plan and batches, the results of training and of evaluation have the same bits as without the
        interruption, also with random numbers.

        Args:
            folder: written by `checkpoint` or by ``dcp.save({"pipe": pipe}, …)``; `panpipe.latest_checkpoint` finds the
                last one.

        Raises:
            RequestError: there is no complete checkpoint, or it is of another model, optimizer or scheduler.
        """
        self._refuse_closed()
        self.checkpoints.read(folder)

    def close(self) -> None:
        """Close threads and connections; again does no harm. What trains, evaluates or saves is refused from then on.

        A script that ends without it is closed at its end.
        """
        self._closed = True
        self._team.close()

    def __repr__(self) -> str:
        """The plan, how far training is, and what this process holds."""
        held = ", ".join(map(str, sorted(self._states))) or "none"
        where = ", ".join(dict.fromkeys(str(device) for device in self._team.where.values()))
        state = "closed" if self._closed else f"{counted(self.steps, 'step')} trained"
        return f"<Pipeline {state}; stages here: {held}, on {where}\n  {self.plan!r}>"

    def __enter__(self) -> Self:
        self._refuse_closed()
        return self

    def __exit__(self, _: Any, failure: BaseException | None, __: Any) -> None:
        """Close; the other processes learn of a failure that is this one's alone."""
        if failure is not None and not isinstance(failure, PanpipeError | SystemExit):
            self._team.fail(failure)
        self.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RequestError("the pipeline is closed: call close() after the last step, or build another pipeline")

    # One step

    def rehearse(self, batch: Any, steps: int, warm_up: int = 0) -> list[Rehearsal]:
        """Run some steps that change nothing; what is seen of them is the same on every rank.

        Buffers are put back, optimizers are not stepped, and the count of steps stays, so that training begins as it
        would have without. What has no values yet has stand-ins meanwhile, and no memory afterwards.

        Args:
            batch: a whole batch.
            steps: that are recorded, each between two readings of the reference workload.
            warm_up: steps before them, of which nothing is seen.
        """
        count, seen, prediction = self.steps, list[Rehearsal](), self.plan.prediction
        passes = PASSES if prediction is None else passes_around(prediction.step_s)
        with self._stages.rehearsing():
            for _ in range(warm_up):
                self._run(batch, StepOptions(Ending.REDUCE, trace=True))
            before = reference_s(self._team, passes) if steps else 0.0
            for _ in range(steps):
                start = time.perf_counter()
                _, done = self._run(batch, StepOptions(Ending.REDUCE, trace=True))
                whole_s = self._team.decide(partial(float, time.perf_counter() - start))
                records = self._gather(done.records)
                after = reference_s(self._team, passes)
                around = (before + after) / 2
                seen.append(Rehearsal(measured_trace(done.plan, records), message_times(records), whole_s, around))
                before = after
        self._counts.steps = count
        return seen

    def _follow_model(self) -> None:
        """Have the stages hold what the model holds now, where it was changed between steps."""
        when = f"between steps {self.steps} and {self.steps + 1}" if self.steps else "before the first step"
        if self._stages.follow_model(when):
            self._variants.forget()

    def _traced(self, done: BatchResult) -> Trace:
        self.trace = done.trace or measured_trace(done.plan, self._gather(done.records))
        return self.trace

    def _captured(self, batch: Any, device: str) -> CapturedStep:
        with as_meta_tensors(self.model):
            return capture_step(self.model, self._step, batch, device=device)

    def _gather(self, records: Mapping[int, StepRecord]) -> list[StepRecord]:
        return self._team.everywhere(lambda device: records[device])

    def _evaluated(self, asked: Forwards, batch: Any, trace: bool = False) -> BatchResult:
        self._refuse_closed()
        self._stages.have_values()
        self._stages.tied.follow()
        ready = self._evaluator.batch(asked, self._cutter.cut(batch, asked.function))
        done = self._evaluator.run(ready, trace)
        if ready.remark is not None and self._team.first:
            warnings.warn(ready.remark, stacklevel=3)
        self.metrics = done.metrics if done.loss is not None else self.metrics
        self.trace = done.trace or self.trace
        return done

    def _run(self, batch: Any, options: StepOptions) -> tuple[Tensor, BatchResult]:
        self._refuse_closed()
        self._averages.refuse_applied("train")
        refuse_no_grad()
        self._modes.refuse_others()
        if options.ending is not Ending.REDUCE:
            self._stages.have_values()
            self._stages.tied.follow()
        ready = self._runner.batch(self._cutter.cut(batch))
        if ready.remark is not None and self.steps and self._team.first:
            warnings.warn(ready.remark, stacklevel=3)
        done = self._runner.run(ready, self.steps, options)
        assert done.loss is not None
        self._stages.tied.note()
        self._counts.steps, self._counts.visits = self._counts.steps + 1, 0
        if options.ending is Ending.STEP:
            self._norm, self.skipped = self._runner.norm, self._runner.skipped
            self._counts.updates += not self.skipped
            if not self.skipped:
                self._averages.update()
        self.metrics = done.metrics
        self.trace = done.trace or self.trace
        return done.loss, done
