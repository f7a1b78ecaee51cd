"""A model with BatchNorm whose outputs become NaN or infinite where a batch says, and training without a pipeline."""

import math
from typing import Any

import torch
from panpipe.runtimes.diagnose.parity import reference_of_replicas
from torch import nn
from torch.nn import functional as F

from ..training import SGD, case_of

LAYERS = 6


class Layer(nn.Module):
    """A layer with BatchNorm; poison is added last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, poison: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + self.norm(y) * (y + mask).softmax(-1) + poison


class Poisoned(nn.Module):
    """Layers with BatchNorm; the batch's ``poison`` is added to the output of each, a column for a layer.

    A mask with infinities passes all layers, as a mask of attention does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, poison: torch.Tensor) -> torch.Tensor:
        mask = torch.where(x > 1, -math.inf, 0.0)
        for number, layer in enumerate(self.layers):
            x = layer(x, mask, poison[:, number : number + 1])
        return self.head(x)


def poisoned_batch(
    rows: int, dtype: torch.dtype, layer: int | None = None, row: int = 0, value: float = math.nan
) -> dict[str, torch.Tensor]:
    """A batch; with ``layer`` the output of this layer for this row is not finite."""
    generator = torch.Generator().manual_seed(1)
    poison = torch.zeros(rows, LAYERS, dtype=dtype)
    if layer is not None:
        poison[row, layer] = value
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64).to(dtype)
    x[:, 0] = 2.0  # every row has a masked place
    return {"x": x, "poison": poison, "y": torch.randint(0, 4, (rows,), generator=generator)}


def _step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    loss = F.cross_entropy(model(batch["x"], batch["poison"]), batch["y"])
    return loss, {"doubled": 2 * loss}


POISONED = case_of(Poisoned, _step, poisoned_batch)


class Skipping:
    """One process that skips updates after a loss that is not finite.

    Args:
        model: is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer, self.index = model, SGD(model.parameters()), 0

    def step(self, *batches: Any, microbatches: int = 4) -> float:
        """One update by the mean over some batches of a replica each, or none."""
        loss = reference_of_replicas(
            self.model, POISONED.step, list(batches), microbatches=microbatches, seed=3, index=self.index
        ).item()
        self.index += 1
        if math.isfinite(loss):
            self.optimizer.step()
        return loss
