"""The part of a pipeline's interface for optimizers, averages and checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ...core.errors import RequestError
from ..launch.team import Team
from ..training.averages import AverageFunction, Visit, WeightAverage, visit
from ..training.evaluation import Evaluator
from ..training.local_stages import LocalStages
from ..training.steps import StepRunner
from .checkpoints import read_checkpoint, write_checkpoint
from .training_state import TrainingState


class Resumable(ABC):
    """The part of a pipeline that a checkpoint saves and restores.

    Attributes:
        model: the user's module.
        steps: batches so far.
        updates: optimizer steps so far.
        scaler: of the loss.
    """

    model: nn.Module
    steps: int
    updates: int
    scaler: GradScaler | None
    _team: Team
    _stages: LocalStages
    _runner: StepRunner
    _evaluator: Evaluator
    _averages: list[WeightAverage]
    _applied: bool
    _visits: int

    @abstractmethod
    def _refuse_closed(self) -> None:
        """Refuse calls that need the other processes, after `close`."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the weights as a checkpoint."""

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

    @property
    def _training_state(self) -> TrainingState:
        self._stages.have_values()
        scaler = self.scaler if self.scaler is not None and self.scaler.is_enabled() else None
        return TrainingState(self.model, self._stages.states, self._stages.copy_buffers, scaler, self._averages)

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
        if self._runner.gathering:
            raise RequestError(
                "gradients wait for an update since step(batch, update=False), and a checkpoint holds none: save "
                "after a step that updates"
            )
        counts = {"steps": self.steps, "updates": self.updates, "evaluations": self._evaluator.count}
        return self._training_state.read({**counts, "seed": self._runner.seed})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`, of this pipeline or, if one process holds everything, of another one.

        Gradients are cleared. The caller skips the batches of the steps so far; ``steps`` is their number.

        Args:
            state_dict: with everything that this process holds, or more.

        Raises:
            RequestError: it is of another model or optimizer, or is incomplete; nothing is changed then.
        """
        self._training_state.write(state_dict)
        counts = state_dict["progress"]
        self.steps, self.updates, self._evaluator.count = counts["steps"], counts["updates"], counts["evaluations"]
        self._runner.seed = self._evaluator.seed = counts["seed"]
        self._runner.begin_anew()

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
        made = WeightAverage(
            self.model, self._stages.states, decay, buffers, function, self._apply_average, self.save
        )  # fmt: skip
        self._averages.append(made)
        return made

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
        self._visits += 1
        return visit(self.model, self._stages.states, function, (self._runner.seed, self.steps, self._visits))

    def _apply_average(self, applied: bool) -> None:
        """Record whether parameters have the values of an average."""
        if applied:
            self._refuse_closed()
            self._refuse_applied("apply an average")
        self._applied = applied

    def _refuse_applied(self, what: str) -> None:
        if self._applied:
            raise RequestError(f"the model has the values of an average: leave `with ema.applied()` to {what}")

    def checkpoint(self, folder: str | Path) -> None:
        """Write a checkpoint of training with ``torch.distributed.checkpoint``. Every rank calls this.

        Args:
            folder: one that all ranks can access, for this checkpoint alone; created if it does not exist.

        Raises:
            RequestError: there is a checkpoint already, or it cannot be written; see also `state_dict`.
        """
        self._refuse_closed()
        self._refuse_applied("write a checkpoint")
        write_checkpoint(Path(folder), self.state_dict(), self._team)

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
        self._refuse_applied("resume")
        read_checkpoint(Path(folder), self, self._training_state, self._team)
