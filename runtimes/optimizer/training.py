"""How a model is trained beside its plan, as users say it: clipping, loss scaling, schedulers."""

from typing import Any

from attrs import frozen
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...core.errors import RequestError
from .optimizers import SchedulerFactory
from .scaling import LossScale, check_scaled


@frozen
class Training:
    """What happens in an update beside the optimizers' steps.

    Args:
        clip_norm: the most that the global 2-norm of all gradients may be; infinity only measures it; None for neither.
        scaler: scales losses; None, or one that is not enabled, for losses as they are.
        scheduler: makes the scheduler of each stage's optimizer, which is stepped with it; None for none.
    """

    clip_norm: float | None = None
    scaler: GradScaler | None = None
    scheduler: SchedulerFactory | None = None

    def __attrs_post_init__(self) -> None:
        given = self.clip_norm
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not given > 0):
            raise RequestError(
                f"clip_norm is {given!r}: gradients are clipped to a norm above 0; give a positive number, math.inf to "
                "measure the norm alone, or None"
            )
        if self.scaler is not None and not isinstance(self.scaler, GradScaler):
            raise RequestError(
                f"scaler is {self.scaler!r}: losses are scaled by a torch.amp.GradScaler; give one, such as "
                "torch.amp.GradScaler('cpu'), or None"
            )
        if self.scheduler is not None and not callable(self.scheduler):
            raise RequestError(
                f"scheduler is {self.scheduler!r}: give a function of an optimizer, such as lambda o: "
                "torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)"
            )

    @property
    def needs_all_stages(self) -> bool:
        """Whether no stage may step before all have been asked."""
        return self.clip_norm is not None or self._scales

    @property
    def _scales(self) -> bool:
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def parts(self) -> tuple[str, ...]:
        """What an update has that takes time, whatever its numbers are."""
        return ("clipping",) * (self.clip_norm is not None) + ("scaling",) * self._scales

    def loss_scale(self) -> LossScale | None:
        """What scales losses, if anything does."""
        return LossScale(self.scaler) if self.scaler is not None and self._scales else None

    def check(self, model: nn.Module, optimizer: bool) -> None:
        """Refuse a model that cannot be trained so.

        Args:
            model: the user's module.
            optimizer: whether there is one.

        Raises:
            RequestError: a schedule is of no optimizer; or the loss is scaled, and a parameter is of a dtype whose
                gradients cannot be unscaled.
        """
        if self.scheduler is not None and not optimizer:
            raise RequestError("scheduler= schedules an optimizer and there is none: give optimizer=, too")
        if self._scales:
            check_scaled(model.named_parameters())

    @property
    def settings(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        state = self.scaler.state_dict() if self.scaler is not None and self._scales else None
        return {"clip_norm": self.clip_norm, "scaler": state}
