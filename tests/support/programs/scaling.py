"""Loss scaling in one process with torch's own GradScaler, and a model whose gradients overflow where a batch says."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from panpipe.runtimes.diagnose.parity import reference_of_replicas
from torch import nn
from torch.nn import functional as F

from ..models import Case
from ..training import case_of, gradients, parameters, under_autocast, unequal

LAYERS = 6
Scaler = functools.partial(torch.amp.GradScaler, "cpu")
Momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Tapped(nn.Module):
    """Layers with a parameter each, zero, that only the factors of a batch bring into its output, and which alone
    gets their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))
        self.taps = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(LAYERS))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        for number, (layer, tap) in enumerate(zip(self.layers, self.taps, strict=True)):
            x = x + layer(x).tanh() + tap * factors[:, number : number + 1]
        return self.head(x)


def tapped_batch(rows: int, dtype: torch.dtype, overflow: int | None = None) -> dict[str, torch.Tensor]:
    """A batch; with ``overflow`` the gradient of this tap, scaled, is beyond float32, and all others are not."""
    generator = torch.Generator().manual_seed(1)
    factors = torch.zeros(rows, LAYERS, dtype=dtype)
    if overflow is not None:
        factors[:, overflow] = 3e38
    return {
        "x": torch.randn(rows, 16, generator=generator, dtype=torch.float64).to(dtype),
        "factors": factors,
        "y": torch.randint(0, 4, (rows,), generator=generator),
    }


def _tapped_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch["factors"]), batch["y"])


TAPPED = under_autocast(case_of(Tapped, _tapped_step, tapped_batch), torch.float16)


class Alone:
    """One process that trains as PyTorch's documentation has it: scale, unscale, clip, step, update.

    Args:
        case: what is trained.
        model: of it.
        optimizer: of its parameters.
        clip_norm: for ``clip_grad_norm_``.
        scaler: options of a ``GradScaler``.
    """

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer] = Momentum,
        clip_norm: float | None = None,
        **scaler: Any,
    ) -> None:
        self.case, self.model, self.clip_norm = case, model, clip_norm
        self.optimizer, self.scaler = optimizer(model.parameters()), Scaler(**scaler)
        self.index, self.norm = 0, None

    def step(self, *batches: Any, microbatches: int = 4, weights: Sequence[float] | None = None) -> bool:
        """One update by the mean over some batches, each of one replica or more; returns whether it was skipped."""
        total: dict[str, torch.Tensor] = {}
        counts = weights or [1.0] * len(batches)
        for batch, count in zip(batches, counts, strict=True):
            reference_of_replicas(
                self.model, self.case.step, batch if isinstance(batch, list) else [batch], microbatches=microbatches,
                seed=3, index=self.index, scaler=self.scaler,
            )  # fmt: skip
            total = {name: total.get(name, 0) + each * count for name, each in gradients(self.model).items()}
            self.index += 1
        for name, parameter in self.model.named_parameters():
            parameter.grad = total[name] / sum(counts) if name in total else None
        self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm).item()
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() < before


def differences(model: nn.Module, alone: nn.Module) -> list[str]:
    """Names of the parameters, and of gradients, that are not the same to the last bit; NaN is."""
    mine, wanted = ({n: g.nan_to_num(12.5) for n, g in gradients(each).items()} for each in (model, alone))
    return [*unequal(parameters(model), parameters(alone)), *(f"gradient of {n}" for n in unequal(mine, wanted))]
