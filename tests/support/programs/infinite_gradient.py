"""A model whose loss is finite and one of whose gradients is infinite where a batch says."""

import torch
from torch import nn
from torch.nn import functional as F

from ..training import case_of


class Root(nn.Module):
    """Adds the square root of ``x[:, :1]``, whose gradient with respect to a parameter is infinite at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(8, 8), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + (x[:, :1].detach() + self.shift - self.shift.detach()).sqrt()


def root_batch(rows: int, dtype: torch.dtype, zero: bool = False) -> dict[str, torch.Tensor]:
    """A batch; with ``zero`` the root of a row is that of 0."""
    x = torch.rand(rows, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype) + 0.5
    if zero:
        x[5, 0] = 0.0
    return {"x": x, "y": torch.ones(rows, 4, dtype=dtype)}


def _step(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(given["x"]), given["y"])


class WithRoot(nn.Module):
    """The root of the batch's own values, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.root, self.last = nn.Linear(8, 8), Root(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x) + self.root(x)))


ROOT = case_of(WithRoot, _step, root_batch)
