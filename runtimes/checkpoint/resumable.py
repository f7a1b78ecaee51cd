"""What a pipeline shows of its optimizers, and how its training is saved and goes on."""

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
    """The part of a pipeline that outlives it.

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
        """Refuse what needs the other processes, after `close`."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the weights as a checkpoint."""

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The optimizers of this process, by stage; stages without one are left out.

        For what ``scheduler=`` is not: schedulers of your own over each of them, stepped on every rank alike.
        """
        self._stages.have_values()
        return {index: state.optimizer for index, state in self._stages.states.items() if state.optimizer is not None}

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group, as the next update has it.

        The groups are those of the first stage here that has an optimizer; without one there are none.
        """
        first = next(iter(self.optimizers.values()), None)
        return [float(group["lr"]) for group in first.param_groups if "lr" in group] if first is not None else []

    @property
    def _training_state(self) -> TrainingState:
        self._stages.have_values()
        scaler = self.scaler if self.scaler is not None and self.scaler.is_enabled() else None
        return TrainingState(self.model, self._stages.states, self._stages.copy_buffers, scaler, self._averages)

    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from, as far as this process holds it.

        Weights, buffers, the state of optimizers, schedulers and a scaler, and the counts behind the random numbers, by
        the model's own names: with `load_state_dict` it makes a pipeline ``Stateful`` for
        ``torch.distributed.checkpoint``, as in ``dcp.save({"pipe": pipe}, checkpoint_id=folder)``, and under another
        plan ``dcp.load`` reads the same files.
        Tensors are those in use and no copies. Names of the optimizer's state are those of
        ``torch.distributed.checkpoint.state_dict`` with ``flatten_optimizer_state_dict=True``.

        Raises:
            RequestError: gradients of several batches wait for their update, or the optimizer keeps something that
                belongs to no parameter.
        """
        if self._runner.gathering:
            raise RequestError(
                "gradients wait for an update since step(batch, update=False), and a checkpoint holds none: save "
                "behind a step that updates"
            )
        counts = {"steps": self.steps, "updates": self.updates, "evaluations": self._evaluator.count}
        return self._training_state.read({**counts, "seed": self._runner.seed})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, of this pipeline or, where one process holds all, of another one.

        Gradients are cleared. Batches are yours: ``steps`` says how many there were.

        Args:
            state_dict: with everything that this process holds, or more.

        Raises:
            RequestError: it is of another model or optimizer, or lacks something; nothing is changed then.
        """
        self._training_state.write(state_dict)
        counts = state_dict["progress"]
        self.steps, self.updates, self._evaluator.count = counts["steps"], counts["updates"], counts["evaluations"]
        self._runner.seed = self._evaluator.seed = counts["seed"]
        self._runner.begin_anew()

    def ema(
        self, decay: float = 0.999, *, buffers: bool = False, function: AverageFunction | None = None
    ) -> WeightAverage:
        """Keep an average of the weights: each process of what it holds, moved after every update. Every rank asks.

        It begins as the values that parameters have now, and an update that is skipped does not move it. Checkpoints
        written from now on hold it, and `resume` reads it where it was made before. Its ``applied()`` is a context in
        which the model computes with it, for evaluation; its ``save(folder)`` writes it.

        Args:
            decay: the average becomes ``average.lerp_(parameter, 1 - decay)``.
            buffers: whether buffers are averaged, too; else those of the model count.
            function: ``function(average, parameter, updates)`` returns the new average: ``avg_fn`` of
                ``torch.optim.swa_utils.AveragedModel``, in place of ``decay``.

        Raises:
            RequestError: decay is no number from 0 to 1, or function is none.

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
        """Call a function with every parameter, in each process that holds it. Every rank calls this alike.

        For what a loop over ``model.parameters()`` does in one process between steps: clipping of weights, noise,
        statistics. It may change parameters in place; their gradients are in ``grad``. Processes that hold a tied
        weight, and replicas, call it with the same value and the same random numbers, and must do the same.

        Args:
            function: ``function(name, parameter)``, called without gradients.

        Returns:
            Name → what it returned, of the parameters that this process holds.
        """
        self._refuse_closed()
        self._stages.have_values()
        self._visits += 1
        return visit(self.model, self._stages.states, function, (self._runner.seed, self.steps, self._visits))

    def _apply_average(self, applied: bool) -> None:
        """Note that parameters have the values of an average, or their own again."""
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
            folder: one that all ranks see, for this checkpoint alone; made if it is not there.

        Raises:
            RequestError: there is a checkpoint already, or it cannot be written; see also `state_dict`.
        """
        self._refuse_closed()
        self._refuse_applied("write a checkpoint")
        write_checkpoint(Path(folder), self.state_dict(), self._team)

    def resume(self, folder: str | Path) -> None:
        """Go on from a checkpoint, whatever plan and however many processes wrote it. Every rank calls this.

        With the same plan and batches, results are to the last bit those of training that never stopped, and so are
        those of evaluations, whatever random numbers they draw.

        Args:
            folder: that `checkpoint`, or ``dcp.save({"pipe": pipe}, …)``, wrote; `panpipe.latest_checkpoint` finds the
                last one.

        Raises:
            RequestError: there is no whole checkpoint, or one of another model, optimizer or scheduler.
        """
        self._refuse_closed()
        self._refuse_applied("resume")
        read_checkpoint(Path(folder), self, self._training_state, self._team)
