"""What a `Pipeline` consists of: the trainer, checkpoints, and changes of its plan."""

from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.capture.programs.stage_programs import StagePrograms
from ..core.costs.reductions import TensorReductions
from ..core.errors import warn_caller
from ..core.plan.plan import Plan
from ..core.wording import first_of
from .checkpoint.checkpoints import Checkpoints
from .engine.step_data import StepOptions
from .metrics import LazyValue, Metrics
from .replan.plan_changes import PlanChanges
from .trainer import Trainer
from .training.agreement import InitialWeights
from .update.optimizers import GivenOptimizer
from .weights import Weights


class Session:
    """Training by a plan, and moves to other plans.

    Attributes:
        trainer: as given.
        model: the user's module.
        checkpoints: writes and reads the state of training.
        changes: moves to other plans.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.model = trainer, trainer.whole_model
        optimizer = trainer.training.optimizer
        self._given = optimizer if isinstance(optimizer, GivenOptimizer) else None
        self.checkpoints = Checkpoints(
            trainer.stages, trainer.state, trainer.averages, trainer.training.scaler, trainer.team
        )
        self.changes = PlanChanges(trainer, self.checkpoints, self._refer_to_parameters)
        if trainer.team.first:
            self._warn_of_unused(set(trainer.operators.graph.parameters))

    def _warn_of_unused(self, read: set[str]) -> None:
        unused = [n for n, p in self.model.named_parameters() if n not in read and p.requires_grad]
        if unused:
            warn_caller(
                f"{first_of(unused, 3)}: the loss does not depend on it; it keeps no gradient until a step uses it, "
                "as in eager"
            )

    @property
    def metrics(self) -> Metrics:
        """The numbers of the last step."""
        given, state = self._given, self.trainer.state
        known = None if given is None else given.learning_rates
        rates = LazyValue(self.trainer.learning_rates if known is None else lambda: known)
        return Metrics(state.metrics, state.steps, state.updates, state.skipped, state.norm, rates)

    @property
    def plan(self) -> Plan:
        """The plan that runs, with its prediction."""
        return self.trainer.team.tensors.shown(self.trainer.plan, lambda: self._reductions)

    @cached_property
    def _reductions(self) -> dict[str, TensorReductions | None]:
        from ..core.analytic.model import tensor_reductions  # other pipelines do not need it

        return tensor_reductions(self.trainer.operators)

    @property
    def programs(self) -> dict[int, StagePrograms]:
        """Programs of the stages in this process, for the last shape of microbatch."""
        return self.trainer.prepared.shapes.latest.programs

    @property
    def stage_parameters(self) -> dict[int, dict[str, nn.Parameter]]:
        """Parameters of the stages in this process, by stage and qualified name."""
        return {index: state.parameters for index, state in self.trainer.stages.states.items()}

    def load(self, weights: Weights, initial: InitialWeights | None = None) -> None:
        """Load the values of this process's stages, and free the parameters that other processes hold.

        Those become meta tensors in the user's model. A parameter that no stage reads stays on the first device.

        Args:
            weights: the source of values for tensors on meta; a checkpoint has values for all tensors.
            initial: how the models of the ranks differ; None if they do not.
        """
        self.trainer.stages.load(weights, initial)
        self._refer_to_parameters()

    def _refer_to_parameters(self) -> None:
        """Let an optimizer over the model refer to the parameters that it has after a move of stages."""
        if self._given is not None:
            self._given.follow_model()

    def train(self, batch: Any, options: StepOptions) -> Tensor:
        """Train on one batch, by the plan whose turn it is; see `Pipeline.step`."""
        self.prepare()
        if self.changes.trains is not None:
            return self.changes.trains(batch, options)
        return self.trainer.train(batch, options).loss

    def prepare(self) -> None:
        """Before a step: raise the failure of a checkpoint that was written in the background; follow the optimizer."""
        if not self.trainer.closed:
            with self.trainer.team.inside(f"step {self.trainer.state.steps + 1}"):
                self.checkpoints.refuse_failed()
        self.follow_optimizer()

    def follow_optimizer(self) -> None:
        """Use the options that the user's schedulers wrote into an optimizer over the model."""
        if self._given is not None:
            self._given.copy_options(self._stage_optimizers())

    def lead_optimizer(self) -> None:
        """Write the options of a checkpoint, which the stages have, into an optimizer over the model."""
        if self._given is not None:
            self._given.take_options(self._stage_optimizers())

    def _stage_optimizers(self) -> list[Optimizer]:
        return [each.optimizer for each in self.trainer.stages.states.values() if each.optimizer is not None]
