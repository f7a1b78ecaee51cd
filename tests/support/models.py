"""Small models with real parts, and the steps that train them; imported by tests and by the ranks that they start."""

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A transformer block with dropout in attention and after both halves."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(rows, length, width)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class TinyGPT(nn.Module):
    """Embedding, blocks, and an output layer whose weight is the embedding's."""

    def __init__(self, layers: int = 1, width: int = 16, vocabulary: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, in-place activations, and a skip connection over the whole trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.trunk = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = start = self.stem(images)
        for conv, norm in zip(self.trunk, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True)
        return self.head((x + start).mean((2, 3)))


def gpt_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def conv_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def weighted_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """A mean over the tokens that count, which differ by microbatch; with metrics."""
    logits = model(batch["x"]).flatten(0, 1)
    target = batch["y"].flatten()
    counted = target > 8
    loss = F.cross_entropy(logits, target.where(counted, torch.full_like(target, -100)))
    return loss, counted.sum(), {"confidence": logits.softmax(-1).amax(-1).mean()}


@frozen
class Case:
    """A model with its step and data.

    Args:
        model: makes it in a dtype.
        step: its training step.
        batch: (rows, dtype) → a batch.
    """

    model: Callable[[torch.dtype], nn.Module]
    step: Callable[[nn.Module, Any], Any]
    batch: Callable[[int, torch.dtype], Any]


def _seeded(make: Callable[[], nn.Module]) -> Callable[[torch.dtype], nn.Module]:
    def build(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return make().to(dtype).train()

    return build


def _tokens(rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, 32, (rows, 12), generator=generator) for name in ("x", "y")}


def tokens(rows: int, length: int = 12) -> dict[str, torch.Tensor]:
    """Inputs and targets for a language model, others for each size."""
    generator = torch.Generator().manual_seed(rows + 100 * length)
    return {name: torch.randint(0, 32, (rows, length), generator=generator) for name in ("x", "y")}


def _images(rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"x": images.to(dtype), "y": torch.randint(0, 3, (rows,), generator=generator)}


class TurnedNet(nn.Module):
    """Convolutions over time and layers that have the time in another dimension, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)
        self.over_time, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        hidden = torch.tanh(self.head(self.over_time(x.transpose(1, 2))[0])).transpose(1, 2)
        return self.last(hidden) + x


def _turned_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).permute(2, 0, 1).log_softmax(-1).square().mean()


def _sounds(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, 8, 20, generator=torch.Generator().manual_seed(1)).to(dtype)


CASES = {
    "tied gpt with dropout": Case(_seeded(TinyGPT), gpt_step, _tokens),
    "batchnorm with a skip": Case(_seeded(ConvNet), conv_step, _images),
    "token-weighted": Case(_seeded(lambda: TinyGPT(layers=2)), weighted_step, _tokens),
}
BY_NAME = {**CASES, "layers over time": Case(_seeded(TurnedNet), _turned_step, _sounds)}


class Halting(nn.Module):
    """Refines until it changes little: how often is decided by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(16, 16)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.1, self.training)
        for _ in range(4):
            update = self.step(x).tanh()
            x = x + 0.5 * update
            self.steps += 1
            if update.abs().mean() < 0.35:
                break
        return x


def _halting() -> nn.Module:
    first, last = (nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(2))
    return nn.Sequential(*first, Halting(), *last)


def _branching_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    loss = F.mse_loss(model(batch["x"]), batch["y"])
    return (2 * loss if loss > 0.1 else loss), {"loss": float(loss.detach())}


def _vectors(rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    drawn = torch.randn(2, rows, 16, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    return {"x": drawn[0].to(dtype), "y": drawn[1].to(dtype)}


PYTHON = Case(_seeded(_halting), _branching_step, _vectors)
"""A module and the end of a step that need values."""


def sizes_of(work: Any, field: str) -> list[int]:
    """Bytes of each exchange of a model's work in one direction: ``forward_bytes`` or ``backward_bytes``."""
    exchanges = [each for operator in work.operators for each in operator.work.exchanges]
    return [getattr(each, field) for each in exchanges if getattr(each, field)]
