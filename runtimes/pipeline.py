"""`Pipeline`, the public interface to a model that trains by a plan; `training/trainer` does the work."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.analytic.model import tensor_reductions
from ..core.capture.programs.stage_programs import StagePrograms
from ..core.capture.regions.breaks import StepFunction
from ..core.costs.reductions import TensorReductions
from ..core.errors import PanpipeError, RequestError
from ..core.plan.plan import Plan
from ..core.search import Oracle
from ..core.trace.trace import Trace
from ..core.wording import counted, first_of
from .batch.example import Example
from .checkpoint.checkpoints import Checkpoints
from .engine.clocked import Clock
from .engine.step_data import StepOptions
from .launch.team import Team
from .monitor.monitors import Monitor
from .offload.tier import OffloadTier
from .optimizer.training import Training
from .optimizer.update import Ending
from .planning.contest import Contest, arrangement
from .planning.contest_run import ContestRun
from .programs.options import ProgramOptions
from .replan.replanner import AutomaticReplanning, Replanner
from .training.averages import AverageFunction, Visit, WeightAverage, visit_parameters
from .training.evaluation import ForwardFunction
from .training.initial_weights import InitialWeights
from .training.trainer import Trainer
from .weights import Weights

_INSTEAD = {
    **dict.fromkeys(["train", "eval", "parameters", "named_parameters"], ": call it on the model"),
    **dict.fromkeys(["backward", "zero_grad"], ": pipe.step(batch) runs backward and optimizer, and clears gradients"),
    "optimizer": ": each stage has its own; see 'optimizers', or 'learning_rates'",
    "generate": ": call model.generate(...) itself in one process, or pipe.save(folder) and load it",
}
"""Fixes for names that users of a module or of an optimizer look for."""


class Pipeline:
    """A model that trains as a pipeline.

    Args:
        example: the user's model and step, captured for the largest microbatch; the microbatch is not kept.
        plan: a valid plan, with SYNC if ``training`` needs all stages at once.
        team: the devices.
        training: optimizer, clipping, scaling and seed.
        programs: how stage programs are derived.
        clock: runs simulated devices; None for real ones.
        offload: where saved tensors go that leave their device; None for the host's memory.
        monitors: functions that are called with the numbers of each step.

    Attributes:
        model: the user's module.
        checkpoints: writes and reads the state of training; `checkpoint`, `resume`, `state_dict` and `load_state_dict`
            call it.
        scaler: scales losses; the user's own.
        replanner: plans again; None if that is not possible.
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
        training = training or Training()
        self.model = example.model if team.tensor is None else team.tensor.model
        self.scaler = training.scaler
        self._operators = example.operators
        self._trainer = trainer = Trainer(
            example, plan, team, training, programs or ProgramOptions(), clock, offload, monitors
        )
        self.checkpoints = Checkpoints(trainer.stages, trainer.state, trainer.averages, self.scaler, team)
        self.replanner: Replanner | None = None
        self._automatic: AutomaticReplanning | None = None
        self._contest: ContestRun | None = None
        if team.first:
            self._warn_of_unused(set(example.operators.graph.parameters))

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that raises an AttributeError
            return object.__getattribute__(self, name)
        raise AttributeError(f"'Pipeline' object has no attribute '{name}'{_INSTEAD.get(name, '')}")

    def __reduce__(self) -> Any:
        raise RequestError("a pipeline cannot be copied or pickled: call pipe.checkpoint(folder) or pipe.save(folder)")

    def _warn_of_unused(self, read: set[str]) -> None:
        unused = [n for n, p in self.model.named_parameters() if n not in read and p.requires_grad]
        if unused:
            warnings.warn(
                f"{first_of(unused, 3)}: the loss does not depend on it; it keeps no gradient until a step uses it, "
                "as in eager",
                stacklevel=4,
            )

    @property
    def metrics(self) -> dict[str, float]:
        """The other parts of the step's result for the last batch, trained on or evaluated.

        On a GPU reading them waits for the step.
        """
        return self._trainer.state.metrics()

    @property
    def skipped(self) -> bool:
        """Whether the last update was skipped.

        With a scaler because a gradient of some stage was not finite; with ``on_nonfinite="skip"`` or ``"raise"``
        because the loss was not, of this batch or of one whose gradients waited for the update, or the global norm.
        """
        return self._trainer.state.skipped

    @property
    def trace(self) -> Trace | None:
        """The trace of the last step that was traced; under a clock every step is. None if there is none."""
        return self._trainer.state.trace

    @property
    def plan(self) -> Plan:
        """The plan that runs, with its prediction."""
        tensor = self._trainer.team.tensor
        return self.rank_plan if tensor is None else tensor.shown(self.rank_plan, self._reductions)

    @property
    def rank_plan(self) -> Plan:
        """The same, with a replica for each tensor rank, as the ranks run it."""
        return self._trainer.plan

    @rank_plan.setter
    def rank_plan(self, plan: Plan) -> None:
        self._trainer.plan = plan

    @cached_property
    def _reductions(self) -> dict[str, TensorReductions | None]:
        return tensor_reductions(self._operators)

    def step(self, batch: Any, *, update: bool = True) -> Tensor:
        """Train on one batch: forward, backward, reduction and optimizer step.

        Args:
            batch: a whole batch, as the example was; every rank of a replica passes the same one.
            update: False keeps the gradients for a later batch, whose update takes the mean over all of them: of
                samples, or of the step's own weights.

        Returns:
            The loss over all replicas, a scalar tensor, on every rank. Other parts of the step's result are in
            ``metrics``. On GPUs it is a tensor on one of them, as in plain PyTorch: the step is issued but has not run
            yet, and reading the loss (``item()``, ``print``) waits for it. A scaler, ``clip_norm`` with
            ``on_nonfinite``, monitors and ``replan="auto"`` wait in every step.

        Raises:
            RequestError: the batch does not fit the plan, or ranks were given different ones: on GPUs that is raised by
                the next call; or the last ``checkpoint(…, wait=False)`` could not be
                written, which is raised once, on every rank and before anything else.
            NonFiniteError: the loss, or the global norm that ``clip_norm`` measures, is not finite, and
                ``on_nonfinite`` is ``"raise"``; the step counts, nothing was updated, and training may go on with
                another batch.
            WorkerError: a worker stopped.
        """
        self._refuse_failed_save()
        options = StepOptions(Ending.STEP if update else Ending.KEEP)
        if self._contest is not None and not self._contest.contest.done:
            return self._contest.train(batch, options)
        if self._automatic is not None:
            return self._automatic.train(batch, options)
        return self._trainer.train(batch, options)[0]

    def replan(self) -> bool:
        """Plan again for the present speeds of the devices, and move stages if that is worth it. Every rank calls this.

        Operators are profiled on all devices at once. If another plan is predicted to be faster by 5 % or more,
        parameters, buffers, optimizer state and averages move between ranks, in memory. Later results have the same
        bits as without; with ``shard`` the norm of ``clip_norm`` and sums over more than two
        replicas may round differently. Gradients are cleared, and programs of other shapes are derived again. The
        result is logged. What replicas share is whole meanwhile, and shared again in the new stages. On other ranks
        parameters become new tensors in the model: references to old ones refuse their use.

        Returns:
            Whether stages were moved.

        Raises:
            RequestError: the pipeline cannot be planned again now: gradients wait for an update, there is no optimizer,
                ``optimizers`` was read, or the step reads other Python values than when it was captured.
        """
        return self._checked_replanner().replan(self._trainer, self.checkpoints)

    def _checked_replanner(self) -> Replanner:
        self._refuse_tensor_ranks("replan")
        self._trainer.refuse_closed()
        self._trainer.averages.refuse_applied("plan again")
        self._trainer.stages.refuse_whole("plan again")
        self._trainer.checks.check_last()
        if self.replanner is None:
            raise RequestError("this pipeline cannot be planned again: build it with panpipe.pipeline on real devices")
        return self.replanner

    def begin_contest(
        self,
        contest: Contest,
        oracle: Oracle,
        keep: Callable[[Plan], None],
        fitted: Callable[[Plan], Plan | None] | None = None,
        rivals: Callable[[Plan], Sequence[Plan]] | None = None,
    ) -> None:
        """Train by the candidates of a contest in turns; see `ContestRun`."""

        def kept(plan: Plan) -> None:
            if self.replanner is not None:
                self.replanner.forget_programs()
            keep(plan)

        self._contest = ContestRun(self._trainer, contest, self._move, oracle, kept, fitted, rivals)

    @property
    def contest(self) -> Contest | None:
        """The plans that the first steps compare, with their steps so far; None if none are compared.

        ``print(pipe.contest)`` shows the result, and ``repr`` a line for each plan.
        """
        return None if self._contest is None else self._contest.contest

    def _move(self, plan: Plan) -> bool:
        """Move stages to where a plan has them; returns False on all ranks if a rank cannot."""
        trainer, planner = self._trainer, self.replanner
        refusal = RequestError("") if planner is None else planner.refusal(trainer)
        if any(trainer.team.exchange().gather(refusal is not None)) or planner is None:
            return False
        with trainer.team.inside("a move of stages"):
            trainer.checks.check_last()
            trainer.stages.ensure_equal_values()
            others = [] if self.contest is None else [each.plan for each in self.contest.candidates]
            same = [other for other in others if arrangement(other) == arrangement(plan)]
            planner.move(trainer, self.checkpoints, plan, same)
        return True

    def replan_automatically(self) -> None:
        """Find another plan whenever steps are slower for a while, and compare it with the present one."""

        def replan() -> bool:
            planner = self._checked_replanner()
            contest = planner.contest(self._trainer)
            if contest is not None:
                self.begin_contest(contest, planner.options.oracle, lambda won: None)
            return contest is not None

        self._automatic = AutomaticReplanning(self._trainer, replan)

    def trace_step(self, batch: Any) -> tuple[Tensor, Trace]:
        """Train on one batch and record every action.

        Returns:
            The loss, and the trace of all devices, on every rank.
        """
        self._refuse_failed_save()
        loss, done = self._trainer.train(batch, StepOptions(Ending.STEP, trace=True, watch=True))
        return loss, self._trainer.gathered_trace(done)

    def _refuse_tensor_ranks(self, method: str) -> None:
        """Refuse a method that does not support models with DTensor parameters."""
        tensor = self._trainer.team.tensor
        if tensor is not None:
            tensor.refuse(f"{method} of a pipeline")

    def _refuse_failed_save(self) -> None:
        if not self._trainer.closed:
            with self._trainer.team.inside(f"step {self.steps + 1}"):
                self.checkpoints.refuse_failed()

    def evaluate(self, batch: Any, *, step: StepFunction | None = None) -> Tensor:
        """The step's loss for a batch, forward only.

        As in plain PyTorch under ``torch.no_grad()``, each module computes in its current mode: call ``model.eval()``
        before, and ``model.train()`` after. The step is captured again for each new mode.
        Nothing is saved and nothing changes: no parameter, gradient, optimizer, count or buffer, and no random number
        of a later step. Gradients that wait for an update (``update=False``) are kept.

        Args:
            batch: a whole batch, as for ``step``; of any size and shapes.
            step: another step than that of training, such as one with other metrics. It is captured once for each mode:
                define it once.

        Returns:
            The loss over all replicas, a scalar tensor, on every rank. Other parts of the step's result are in
            ``metrics``.

        Raises:
            RequestError: the batch does not fit the plan, or ranks are in different modes.
            WorkerError: a worker stopped.
        """
        done = self._trainer.evaluate(batch, ForwardFunction(step or self._trainer.step))
        assert done.loss is not None
        return done.loss

    def trace_evaluation(self, batch: Any) -> tuple[Tensor, Trace]:
        """Evaluate and record every action: F and its messages.

        Returns:
            The loss, and the trace of all devices, on every rank.
        """
        done = self._trainer.evaluate(batch, ForwardFunction(self._trainer.step), trace=True)
        assert done.loss is not None
        return done.loss, self._trainer.gathered_trace(done)

    def forward(self, batch: Any, function: StepFunction, *, everywhere: bool = True) -> Any:
        """Run a function of the model forward only, for logits, features or generation.

        Args:
            batch: a whole batch: any nesting of tensors, such as the step's; tensors that the function does not read
                may be left out.
            function: ``function(model, microbatch)``. It returns any nesting of None and of tensors with a row for each
                sample along one dimension. It is captured once for each mode, as by ``evaluate``. Define it once: a
                function that is created again for every batch is captured for every batch.
            everywhere: whether every rank of a replica gets the results; False leaves them on the ranks that compute
                them, and the others get None in their place.

        Returns:
            The results with the nesting of the function's, those of microbatches joined in order; without gradients.
            With replicas those of this replica's batch.

        Raises:
            RequestError: the function returns anything without a row for each sample, or cannot be captured, or reads a
                tensor that no stage holds.
            WorkerError: a worker stopped.
        """
        if not callable(function):
            raise RequestError(f"function is {function!r}: give a function of model and batch that returns tensors")
        return self._trainer.evaluate(batch, ForwardFunction(function, True, everywhere)).rows

    @property
    def grad_norm(self) -> float | None:
        """The global 2-norm of the last update's gradients, before clipping; None without ``clip_norm``.

        On a GPU reading it waits for the step.
        """
        return None if self._trainer.state.norm is None else self._trainer.state.norm.item()

    @property
    def steps(self) -> int:
        """Number of batches so far. Set it to continue with the random numbers of that step."""
        return self._trainer.state.steps

    @steps.setter
    def steps(self, number: int) -> None:
        self._trainer.state.steps = number

    @property
    def updates(self) -> int:
        """Number of optimizer steps so far, without skipped ones."""
        return self._trainer.state.updates

    @property
    def programs(self) -> dict[int, StagePrograms]:
        """Programs of the stages in this process, for the last shape of microbatch."""
        return self._trainer.prepared.shapes.latest.programs

    @property
    def stage_parameters(self) -> dict[int, dict[str, nn.Parameter]]:
        """Parameters of the stages in this process, by stage and qualified name."""
        return {index: state.parameters for index, state in self._trainer.stages.states.items()}

    def load(self, weights: Weights, initial: InitialWeights | None = None) -> None:
        """Load the values of this process's stages, and free the parameters that other processes hold.

        Those become meta tensors in the user's model. A parameter that no stage reads stays on the first device.

        Args:
            weights: the source of values for tensors on meta; a checkpoint has values for all tensors.
            initial: how the models of the ranks differ; None if they do not.
        """
        self._trainer.stages.load(weights, initial)

    def save(self, folder: str | Path, *, frozen: bool = True) -> None:
        """Write parameters and persistent buffers as a checkpoint: a safetensors file per process, and their index.

        ``weights=folder`` reads it under any plan; so does transformers, if the model's ``config.json`` is in the same
        folder. A tied weight is written once, under its first name. Every rank calls this.

        Args:
            folder: one that all ranks can access; created if it does not exist. A checkpoint of the same number of
                processes is replaced.
            frozen: False writes the parameters with ``requires_grad`` alone, such as those of an adapter.

        Raises:
            RequestError: a file cannot be written there.
        """
        self._trainer.save(folder, frozen)

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The optimizers of this process, by stage; stages without one are omitted.

        For schedulers that ``scheduler=`` does not support: create one for each optimizer, and step them on every rank.
        """
        self._trainer.optimizers_lent = True
        return self._trainer.optimizers

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group in the next update.

        The groups are those of this process's first stage with an optimizer, or of all stages if it has none.
        """
        first = next(iter(self._trainer.optimizers.values()), None) or self._trainer.rates_without_parameters()
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
            RequestError: decay is not a number from 0 to 1, or function is not callable; or function is given and
                parameters are DTensors, of which each process has a part.

        Example:
            >>> ema = pipe.ema(0.999)  # doctest: +SKIP
            >>> with ema.applied():  # doctest: +SKIP
            ...     loss = pipe.evaluate(batch)
        """
        if function is not None:
            self._refuse_tensor_ranks("ema(function=)")
        self._trainer.refuse_closed()
        self._trainer.stages.ensure_values()
        return self._trainer.averages.add(decay, buffers, function)

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
        self._refuse_tensor_ranks("on_parameters")
        trainer = self._trainer
        trainer.refuse_closed()
        trainer.stages.ensure_values()
        trainer.state.visits += 1
        key = trainer.state.seed, trainer.state.steps, trainer.state.visits
        with trainer.stages.whole_parameters():
            return visit_parameters(self.model, trainer.stages.states, function, key)

    def whole_parameters(self) -> AbstractContextManager[None]:
        """A context in which each replica holds its stages' parameters whole, where replicas share them
        (``shard="parameters"``). Every rank enters it.

        Between steps each replica has only a part of them, and using their values is refused. What is written to them
        within, the same in all replicas, is kept; after an error nothing is. Training is refused within. Without such
        stages it does nothing.

        Example:
            >>> with pipe.whole_parameters():  # doctest: +SKIP
            ...     norm = model.head.weight.norm()
        """
        self._trainer.refuse_closed()
        self._trainer.stages.ensure_values()
        return self._trainer.stages.whole_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The state needed to resume training, as far as this process holds it.

        It has weights, buffers, the state of optimizers, schedulers and a scaler, and the counters that the random
        numbers depend on, by the model's own names. With `load_state_dict` it makes a pipeline ``Stateful`` for
        ``torch.distributed.checkpoint``, as in ``dcp.save({"pipe": pipe}, checkpoint_id=folder)``; ``dcp.load`` reads
        the same files under another plan.
        Tensors are not copied, but where replicas share optimizers, or tensor ranks have parts: then these are gathered
        on the CPU, and every rank calls this. Names of the optimizer's state are those of
        ``torch.distributed.checkpoint.state_dict`` with ``flatten_optimizer_state_dict=True``.

        Raises:
            RequestError: gradients of several batches wait for their update, or the optimizer has state that belongs to
                no parameter.
        """
        self._trainer.checks.check_last()
        return self.checkpoints.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`, of this pipeline or, if one process holds everything, of another one.

        Gradients are cleared. The caller skips the batches of the steps so far; ``steps`` is their number.

        Args:
            state_dict: with everything that this process holds, or more.

        Raises:
            RequestError: it is of another model or optimizer, or is incomplete; nothing is changed then.
        """
        self.checkpoints.load_whole(state_dict)
        self._trainer.checks.drop_last()

    def checkpoint(self, folder: str | Path, *, wait: bool = True, keep: int | None = None) -> None:
        """Write a checkpoint of training. Every rank calls this.

        It is written into a hidden folder next to ``folder``, synchronized to disk, and renamed. A process that is
        killed meanwhile, and a full disk, leave earlier checkpoints as they are.

        Args:
            folder: one that all ranks can access, for this checkpoint alone; created if it does not exist.
            wait: False returns once the state is copied to the host's memory, and a thread writes it while training
                continues. One checkpoint is written at a time: the next call waits for it.
            keep: how many checkpoints to keep, this one included: older ones next to it, whose names differ in the
                number at the end alone, are removed when it is complete. None keeps all.

        Raises:
            RequestError: there is a checkpoint already; it cannot be written; or the one before, with ``wait=False``,
                could not be written, and no `step` has raised that. See also `state_dict`.
        """
        self._trainer.refuse_closed()
        with self._trainer.team.inside("checkpoint"):
            self._trainer.checks.check_last()
            self.checkpoints.write(folder, wait, keep)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last ``checkpoint(…, wait=False)`` is complete. Every rank calls this.

        Raises:
            RequestError: it could not be written; raised once, here or by the next `step`, `checkpoint`, `resume` or
                `close`.
        """
        self.checkpoints.wait()

    def resume(self, folder: str | Path) -> None:
        """Resume from a checkpoint, written under any plan by any number of processes. Every rank calls this.

        With the same plan and batches, the results of training and of evaluation have the same bits as without the
        interruption, also with random numbers.

        Args:
            folder: written by `checkpoint`; `panpipe.latest_checkpoint` finds the last one.

        Raises:
            RequestError: there is no whole checkpoint, a file of it was changed, or it is of another model, optimizer
                or scheduler; on every rank, with the same message. Nothing is changed then.
        """
        self._trainer.refuse_closed()
        with self._trainer.team.inside("resume"):
            self.checkpoints.read(folder)
            self._trainer.checks.drop_last()

    def close(self) -> None:
        """Close threads and connections; may be called again. Training, evaluation and saving are refused afterwards.

        A script that ends without it is closed at its end.

        Raises:
            RequestError: the last ``checkpoint(…, wait=False)`` could not be written, or ranks of GPUs were given
                different batches in the last step.
        """
        try:
            self.checkpoints.wait()
            self._trainer.checks.check_last()
        finally:
            self._trainer.close()

    def __repr__(self) -> str:
        """The plan, the number of steps, and the stages of this process."""
        held = ", ".join(map(str, sorted(self._trainer.stages.states))) or "none"
        where = ", ".join(dict.fromkeys(str(device) for device in self._trainer.team.where.values()))
        state = "closed" if self._trainer.closed else f"{counted(self.steps, 'step')} trained"
        return f"<Pipeline {state}; stages here: {held}, on {where}\n  {self.plan!r}>"

    def __enter__(self) -> Self:
        self._trainer.refuse_closed()
        return self

    def __exit__(self, _: Any, failure: BaseException | None, __: Any) -> None:
        """Close, and report a failure of this process alone to the other processes."""
        if failure is not None and not isinstance(failure, PanpipeError | SystemExit):
            self._trainer.team.fail(failure)
        if failure is None or isinstance(failure, RequestError):
            self.close()
        else:
            self._trainer.close()  # other ranks may have stopped: a checkpoint that needs them would never be complete
