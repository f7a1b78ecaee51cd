"""How a model is trained, whatever its plan: optimizers, clipping, loss scaling, schedulers, random numbers."""

from typing import Any

from attrs import field, frozen
from torch import nn

from ...core.errors import RequestError
from ..settings import RAISE, SKIP, Update, one_line, seed_of, values_of
from .given import GivenOptimizer
from .optimizers import OptimizerFactory
from .scaling import LossScale, check_scaled


@frozen(kw_only=True)
class Training(Update):
    """How a model is trained.

    Args:
        optimizer: creates each stage's optimizer; None leaves gradients to the caller.
        seed: of all random numbers.

    Raises:
        RequestError: one of them has a value that it cannot have.
    """

    optimizer: OptimizerFactory | None = None
    seed: int = field(default=0, converter=seed_of)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if isinstance(self.optimizer, GivenOptimizer) and self.scheduler is not None:
            raise RequestError(
                "Update(scheduler=) is given with an optimizer over the model: create the scheduler over that "
                "optimizer and step it after pipe.step(batch), or give a function as optimizer="
            )
        if self.optimizer is not None and not callable(self.optimizer):
            raise RequestError(
                f"optimizer is {one_line(self.optimizer)}: give a class such as torch.optim.AdamW, or a function"
            )

    @classmethod
    def of(cls, update: Update, optimizer: OptimizerFactory | None, seed: int) -> "Training":
        """The training of the user's arguments."""
        return cls(**values_of(update, Update), optimizer=optimizer, seed=seed)

    @property
    def needs_all_stages(self) -> bool:
        """Whether an update needs a value over all stages before any stage steps."""
        return self.clip_norm is not None or self._scales

    @property
    def needs_finite_loss(self) -> bool:
        """Whether an update depends on the loss: then all devices wait for it before they step."""
        return self.on_nonfinite in (RAISE, SKIP)

    @property
    def _scales(self) -> bool:
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts of an update that take time."""
        return ("clipping",) * (self.clip_norm is not None) + ("scaling",) * self._scales

    def loss_scale(self) -> LossScale | None:
        """The loss scale; None without scaling."""
        return LossScale(self.scaler) if self.scaler is not None and self._scales else None

    def check(self, model: nn.Module) -> None:
        """Refuse a model that cannot be trained with these settings.

        Raises:
            RequestError: there is a scheduler without an optimizer; or the loss is scaled, and a parameter has a dtype
                whose gradients cannot be unscaled.
        """
        if self.scheduler is not None and self.optimizer is None:
            raise RequestError(
                "Update(scheduler=) is given without optimizer=: a scheduler needs an optimizer; give both"
            )
        if self._scales:
            check_scaled(model.named_parameters())

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks, in addition to those of `described_updates`."""
        state = self.scaler.state_dict() if self.scaler is not None and self._scales else None
        return {
            "seed": self.seed,
            "clip_norm": self.clip_norm,
            "scaler": state,
            "on_nonfinite": self.on_nonfinite,
        }
