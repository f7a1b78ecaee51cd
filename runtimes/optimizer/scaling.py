"""Loss scaling: the user's ``torch.amp.GradScaler`` says by how much, and is told how every update went.

    scale ──▶ seeds of all backwards ──▶ reductions ──▶ SYNC: check, unscale ──▶ STEP everywhere, or nowhere ──▶ scaler

The small gradients of float16 become zeros unless the loss is scaled up (Micikevicius et al., "Mixed Precision
Training", ICLR 2018, section 3.2). A process has one scaler for all of its devices. The scalers of all ranks hear of
the same overflows, and so stay the same.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ...core.errors import RequestError


class LossScale:
    """What a pipeline asks of a scaler: through its public methods alone, so that subclasses keep their ways.

    Args:
        scaler: enabled.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        # Scalers hear of overflow from optimizers. This one has a single number, whose gradient stands for all.
        self._witness = nn.Parameter(torch.zeros(()))
        self._optimizer = torch.optim.SGD([self._witness])

    def now(self) -> float:
        """What losses are multiplied by."""
        return float(self._scaler.scale(torch.ones(())).item())

    def settle(self, overflow: bool) -> None:
        """Tell the scaler of an update.

        Args:
            overflow: whether it was skipped, because a gradient was not finite.
        """
        self._witness.grad = torch.full((), math.inf if overflow else 0.0)
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()


def unscale(parameters: Iterable[nn.Parameter], scale: float, where: torch.device) -> Tensor:
    """Divide gradients by the scale, in place, as ``GradScaler.unscale_`` does; the host waits for nothing.

    Args:
        parameters: of one device; those without a gradient are left out.
        scale: what the loss was multiplied by.
        where: their device.

    Returns:
        1 there if one of them was not finite, else 0.
    """
    overflow = torch.zeros((), device=where)
    inverse = torch.full((), 1 / scale if scale else math.inf, device=where)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
    return overflow


def check_scaled(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse what cannot be unscaled.

    Args:
        parameters: the model's, by name.

    Raises:
        RequestError: one of those that are trained is in float16, or complex.
    """
    for name, parameter in parameters:
        if parameter.requires_grad and (parameter.dtype is torch.float16 or parameter.is_complex()):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise RequestError(
                f"parameter '{name}' is {dtype}: with a scaler parameters and their gradients are float32, float64 or "
                "bfloat16; call model.float() and compute in float16 under torch.autocast, or leave scaler out"
            )


def check_agreed(total: float, scale: float, members: int) -> None:
    """Refuse a step whose losses were scaled differently.

    Args:
        total: the sum of all members' scales.
        scale: of this one.
        members: how many there are.

    Raises:
        RequestError: they are not the same.
    """
    if total != members * scale and not math.isnan(scale):
        raise RequestError(
            f"the loss is scaled by {scale:g} here and by {total / members:g} on the average of {members} ranks: it "
            "must be the same on all; load the same state into the scaler of every rank"
        )
