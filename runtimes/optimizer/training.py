"""How a model is trained, whatever its plan: optimizers, clipping, loss scaling, schedulers, random numbers."""

from typing import Any

from attrs import field, frozen
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...core.errors import RequestError
from ...core.whole_numbers import whole_number
from .optimizers import OptimizerFactory, SchedulerFactory
from .scaling import LossScale, check_scaled

RAISE, SKIP, WARN = "raise", "skip", "warn"
ON_NONFINITE = (RAISE, SKIP, WARN)
"""The choices for a loss that is not finite; see `training/non_finite`."""


def _check_on_nonfinite(_: Any, __: Any, given: object) -> None:
    if given is not None and given not in ON_NONFINITE:
        raise RequestError(
            f"on_nonfinite is {given!r}: a loss that is not finite raises an error, skips the update or warns; give "
            "'raise', 'skip', 'warn', or None for no check"
        )


def _one_line(given: object) -> str:
    """An argument of a wrong type; the texts of optimizers have a line for each option."""
    text = " ".join(repr(given).split())
    return text if len(text) <= 60 else f"a {type(given).__name__}"


def _seed(given: Any) -> int:
    return whole_number("seed", given)


@frozen
class Training:
    """How a model is trained.

    Args:
        clip_norm: the maximum of the global 2-norm of all gradients; infinity only measures it; None for neither.
        scaler: scales losses; None, or one that is not enabled, for no scaling.
        scheduler: creates the scheduler of each stage's optimizer, stepped after it; None for none.
        optimizer: creates each stage's optimizer; None leaves gradients to the caller.
        seed: of all random numbers.
        on_nonfinite: what to do if a loss is not finite (see `training/non_finite`); None for no check.

    Raises:
        RequestError: one of them has a value that it cannot have.
    """

    clip_norm: float | None = None
    scaler: GradScaler | None = None
    scheduler: SchedulerFactory | None = None
    optimizer: OptimizerFactory | None = None
    seed: int = field(default=0, converter=_seed)
    on_nonfinite: str | None = field(default=WARN, validator=_check_on_nonfinite)

    def __attrs_post_init__(self) -> None:
        if self.optimizer is not None and not callable(self.optimizer):
            raise RequestError(
                f"optimizer is {_one_line(self.optimizer)}: give a class such as torch.optim.AdamW, or a function"
            )
        given = self.clip_norm
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not given > 0):
            raise RequestError(
                f"clip_norm is {given!r}: gradients are clipped to a norm above 0; give a positive number, math.inf to "
                "measure the norm alone, or None"
            )
        if self.scaler is not None and not isinstance(self.scaler, GradScaler):
            raise RequestError(
                f"scaler is {_one_line(self.scaler)}: losses are scaled by a torch.amp.GradScaler; give one, such as "
                "torch.amp.GradScaler('cpu'), or None"
            )
        if self.scheduler is not None and not callable(self.scheduler):
            raise RequestError(
                f"scheduler is {_one_line(self.scheduler)}: give a function of an optimizer, such as lambda o: "
                "torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)"
            )

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
            raise RequestError("scheduler= is given without optimizer=: a scheduler needs an optimizer; give both")
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
