"""How a model is trained, whatever its plan: optimizers, clipping, loss scaling, schedulers, random numbers.

Loss scaling: the user's ``torch.amp.GradScaler`` gives the scale, and is updated after every step.

    scale ──▶ seeds of all backwards ──▶ reductions ──▶ SYNC: check, unscale ──▶ STEP everywhere, or nowhere ──▶ scaler

The small gradients of float16 become zeros unless the loss is scaled up (Micikevicius et al., "Mixed Precision
Training", ICLR 2018, section 3.2). A process has one scaler for all of its devices. The scalers of all ranks are
updated with the same overflows, and so stay equal.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ...core.errors import RequestError
from ...core.wording import value_text
from ..settings import RAISE, SKIP, Update, seed_of, values_of
from .optimizers import GivenOptimizer, OptimizerFactory


class LossScale:
    """The loss scale of a pipeline, from the user's scaler. Only public methods are called, so that subclasses work."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._witness: nn.Parameter | None = None

    def now(self) -> float:
        """The factor of the losses. If the scaler's state is on a GPU, the host waits for it."""
        return float(self._scaler.scale(torch.ones((), device=self._device())).item())

    def update(self, overflow: bool) -> None:
        """Update the scaler after a step."""
        where = self._device()
        if self._witness is None or self._witness.device != where:
            # Scalers find overflow in an optimizer's gradients. This optimizer has one scalar, whose gradient shows it.
            self._witness = nn.Parameter(torch.zeros((), device=where))
            self._optimizer = torch.optim.SGD([self._witness])
        self._witness.grad = torch.full((), math.inf if overflow else 0.0, device=where)
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()

    def _device(self) -> torch.device:
        """The device of the scaler's state: the user may have scaled losses on a GPU before. A new one gets the CPU."""
        known = getattr(self._scaler, "_scale", None)  # no public method has it
        return known.device if isinstance(known, Tensor) else torch.device("cpu")


@frozen(kw_only=True)
class Training(Update):
    """How a model is trained.

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
                f"optimizer is {value_text(self.optimizer)}: give a class such as torch.optim.AdamW, or a function"
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
        for name, parameter in model.named_parameters() if self._scales else ():
            if parameter.requires_grad and (parameter.dtype is torch.float16 or parameter.is_complex()):
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise RequestError(
                    f"parameter '{name}' is {dtype}: with a scaler parameters and their gradients are float32, float64 "
                    "or bfloat16; call model.float() and compute in float16 under torch.autocast, or leave scaler out"
                )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks, in addition to those of `describe_update`."""
        state = self.scaler.state_dict() if self.scaler is not None and self._scales else None
        return {
            "seed": self.seed,
            "clip_norm": self.clip_norm,
            "scaler": state,
            "on_nonfinite": self.on_nonfinite,
        }


def unscale(parameters: Iterable[nn.Parameter], factor: Tensor | float, where: torch.device) -> Tensor:
    """Multiply gradients by a factor, in place, as ``GradScaler.unscale_`` does; the host does not wait.

    Args:
        factor: 1 ÷ the factor of the loss, and ÷ what else the gradients are divided by; a scalar.

    Returns:
        A scalar on the device: 1 if one of them was not finite, otherwise 0.
    """
    overflow = torch.zeros((), device=where)
    inverse = factor.float() if isinstance(factor, Tensor) else torch.full((), factor, device=where)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for dtype, gradients in by_dtype.items():
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
        if dtype is torch.float64:  # the factor above is a float32: exact for the scale alone, and not for weights
            torch._foreach_mul_(gradients, factor / inverse.double())
    return overflow
