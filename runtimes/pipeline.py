"""`Pipeline`, the public interface to a model that trains by a plan; `Session` does the work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from torch.optim import Optimizer

from ..core.capture.regions.breaks import StepFunction
from ..core.errors import PanpipeError, RequestError, refuse_no_bool, refuse_other_kinds, without_own_frames
from ..core.plan.plan import Plan
from ..core.trace.trace import Trace
from ..core.wording import counted
from .checkpoint.checkpoints import Saving
from .engine.step_data import StepOptions
from .metrics import Metrics
from .planning.contest import Contest
from .session import Session
from .training.evaluation import ForwardFunction

_INSTEAD = {
    **dict.fromkeys(["train", "eval", "parameters", "named_parameters"], ": call it on the model"),
    **dict.fromkeys(["to", "cuda", "cpu"], ": panpipe.pipeline(devices=) places the stages"),
    "loss": ": pipe.step(batch) returns it",
    **dict.fromkeys(["backward", "zero_grad"], ": pipe.step(batch) runs backward and optimizer, and clears gradients"),
    "generate": ": call model.generate(...) itself in one process, or pipe.save(folder) and load it",
    "optimizer": ": each stage has its own; see pipe.optimizers, or pipe.metrics.learning_rates",
    **{
        name: f": it is pipe.metrics.{name} now"
        for name in ("steps", "updates", "skipped", "grad_norm", "learning_rates")
    },
    **{name: f": it is panpipe.weights.{name}(pipe, ...) now" for name in ("ema", "on_parameters", "whole_parameters")},
    "trace_evaluation": ": it is pipe.trace_step(batch, evaluate=True) now",
    "trace": ": pipe.trace_step(batch) returns it",
    "wait_for_checkpoint": ": it is wait() of what pipe.checkpoint(folder, wait=False) returns",
    **dict.fromkeys(["model", "scaler"], ": use the one that you gave to panpipe.pipeline"),
}
"""Fixes for names that users of a module or of an optimizer look for, and of earlier releases."""


class Pipeline:
    """A model that trains as a pipeline; `panpipe.pipeline` makes one.

    Args:
        session: trains by a plan.
    """

    __slots__ = ("__weakref__", "_session", "_trainer")

    def __init__(self, session: Session) -> None:
        self._session, self._trainer = session, session.trainer

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that raises an AttributeError
            return object.__getattribute__(self, name)
        raise AttributeError(f"'Pipeline' object has no attribute '{name}'{_INSTEAD.get(name, '')}")

    def __reduce__(self) -> Any:
        raise RequestError("a pipeline cannot be copied or pickled: call pipe.checkpoint(folder) or pipe.save(folder)")

    @property
    def metrics(self) -> Metrics:
        """The other parts of the last step's result, by name, and the counters of training; see `Metrics`."""
        return self._session.metrics

    @property
    def plan(self) -> Plan:
        """The plan that runs, with its prediction."""
        return self._session.plan

    @without_own_frames
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
        refuse_no_bool(update=update)
        return self._session.train(batch, StepOptions(update))

    @without_own_frames
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
        return self._session.changes.replan()

    @property
    def contest(self) -> Contest | None:
        """The plans that the first steps compare, with their steps so far; None if none are compared.

        ``print(pipe.contest)`` shows the result, and ``repr`` a line for each plan.
        """
        return self._session.changes.contest

    @without_own_frames
    def trace_step(self, batch: Any, *, evaluate: bool = False) -> tuple[Tensor, Trace]:
        """Train on one batch and record every action.

        Args:
            batch: a whole batch, as for ``step``.
            evaluate: True runs forward only, as ``evaluate`` does: F and its messages.

        Returns:
            The loss, and the trace of all devices, on every rank.
        """
        refuse_no_bool(evaluate=evaluate)
        trainer = self._trainer
        if evaluate:
            done = trainer.evaluate(batch, ForwardFunction(trainer.step), trace=True)
        else:
            self._session.prepare()
            done = trainer.train(batch, StepOptions(trace=True))
        return done.loss, trainer.gathered_trace(done)

    @without_own_frames
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
        return self._trainer.evaluate(batch, ForwardFunction(step or self._trainer.step)).loss

    @without_own_frames
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
        refuse_no_bool(everywhere=everywhere)
        return self._trainer.evaluate(batch, ForwardFunction(function, True, everywhere)).rows()

    @without_own_frames
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
        refuse_other_kinds("folder", folder, str | Path, "the path of a folder")
        refuse_no_bool(frozen=frozen)
        self._trainer.save(folder, frozen)

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The optimizers of this process, by stage; stages without one are omitted.

        For schedulers that ``scheduler=`` does not support: create one for each optimizer, and step them on every rank.
        If an optimizer over the model was given, its options are copied to them before each step.
        """
        self._trainer.optimizers_lent = True
        return self._trainer.optimizers

    @without_own_frames
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
        self._session.follow_optimizer()  # a scheduler may have stepped after the step
        return self._session.checkpoints.state_dict()

    @without_own_frames
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`, of this pipeline or, if one process holds everything, of another one.

        Gradients are cleared. The caller skips the batches of the steps so far; ``metrics.steps`` is their number.

        Args:
            state_dict: with everything that this process holds, or more.

        Raises:
            RequestError: it is of another model or optimizer, or is incomplete; nothing is changed then.
        """
        refuse_other_kinds("state_dict", state_dict, Mapping, "what pipe.state_dict() returned")
        self._session.checkpoints.load_state_dict(state_dict)
        self._session.lead_optimizer()
        self._trainer.checks.drop_last()

    @without_own_frames
    def checkpoint(self, folder: str | Path, *, wait: bool = True, keep: int | None = None) -> Saving:
        """Write a checkpoint of training. Every rank calls this.

        It is written into a hidden folder next to ``folder``, synchronized to disk, and renamed. A process that is
        killed meanwhile, and a full disk, leave earlier checkpoints as they are.

        Args:
            folder: one that all ranks can access, for this checkpoint alone; created if it does not exist.
            wait: False returns once the state is copied to the host's memory, and a thread writes it while training
                continues. One checkpoint is written at a time: the next call waits for it.
            keep: how many checkpoints to keep, this one included: older ones next to it, whose names differ in the
                number at the end alone, are removed when it is complete. None keeps all.

        Returns:
            With ``wait=False`` its ``wait()`` returns when the checkpoint is complete, or raises an error; every rank
            calls it.

        Raises:
            RequestError: there is a checkpoint already; ``keep`` is given and the name has no number at its end; it
                cannot be written; or the one before, with ``wait=False``,
                could not be written, and no `step` has raised that. See also `state_dict`.
        """
        self._trainer.refuse_closed()
        refuse_other_kinds("folder", folder, str | Path, "the path of a folder, such as checkpoints/step-120")
        refuse_no_bool(wait=wait)
        with self._trainer.team.inside("checkpoint"):
            self._trainer.checks.check_last()
            self._session.follow_optimizer()  # a scheduler may have stepped after the step
            return self._session.checkpoints.write(folder, wait, keep)

    @without_own_frames
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
        refuse_other_kinds("folder", folder, str | Path, "the folder of a checkpoint")
        with self._trainer.team.inside("resume"):
            self._session.checkpoints.read(folder)
            self._session.lead_optimizer()
            self._trainer.checks.drop_last()

    @without_own_frames
    def close(self) -> None:
        """Close threads and connections; may be called again. Training, evaluation and saving are refused afterwards.

        A script that ends without it is closed at its end.

        Raises:
            RequestError: the last ``checkpoint(…, wait=False)`` could not be written, or ranks of GPUs were given
                different batches in the last step.
        """
        try:
            self._session.checkpoints.wait()
            self._trainer.checks.check_last()
        finally:
            self._trainer.close()

    def __repr__(self) -> str:
        """The plan, the number of steps, and the stages of this process."""
        held = ", ".join(map(str, sorted(self._trainer.stages.states))) or "none"
        where = ", ".join(dict.fromkeys(str(device) for device in self._trainer.team.where.values()))
        state = "closed" if self._trainer.closed else f"{counted(self._trainer.state.steps, 'step')} trained"
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
