"""The benchmark model: a GPT of 8 layers, width 256, 8 heads, vocabulary 1024, sequence 128; batches of 32 rows.

Its block, and stacks of it or of other blocks, in other sizes too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROWS, MICROBATCHES, LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 32, 8, 8, 256, 8, 1024, 128


class Block(nn.Module):
    """A transformer's block; ``gelu`` is PyTorch's by default."""

    def __init__(self, width: int = WIDTH, gelu: Callable[[torch.Tensor], torch.Tensor] = F.gelu) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = (
            part.view(rows, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, 2)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The whole model, or layers ``low`` to ``high`` of it with the ends that belong there."""

    def __init__(self, low: int = 0, high: int = LAYERS) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH) if low == 0 else None
        self.place = nn.Embedding(LENGTH, WIDTH) if low == 0 else None
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(low, high)})
        self.norm = nn.LayerNorm(WIDTH) if high == LAYERS else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if high == LAYERS else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.token is not None and self.place is not None:
            x = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def stack(block: Callable[[int], nn.Module], width: int, layers: int, vocabulary: int) -> nn.Module:
    """This many blocks between an embedding and a head, the same at every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(vocabulary, width), *(block(width) for _ in range(layers)), nn.Linear(width, vocabulary)
    )


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return loss_of(model(batch[0]), batch[1])


def data(rows: int = ROWS, length: int = LENGTH, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, vocabulary, (rows, length), generator=generator) for _ in range(2))


def make() -> GPT:
    torch.manual_seed(0)
    return GPT()


def even_plan_of(operators: Any, microbatches: int, devices: int = 1, chunks: int = 1) -> Any:
    """A plan by 1F1B with as many operators of a captured step in each stage, without measurements."""
    from panpipe.core.capture.export.operators import tensor_bytes
    from panpipe.core.schedules.problem import ScheduleProblem
    from panpipe.core.schedules.registry import find_family
    from panpipe.core.search import even_plan

    sizes = {name: tensor_bytes(operators.values[p]) for p, name in operators.step.parameters.items()}
    family = find_family("1f1b" if chunks == 1 else "interleaved-1f1b")
    return even_plan(operators.graph, family.build(ScheduleProblem(devices, microbatches, chunks)), sizes)


def accumulate(model: nn.Module, batch: tuple[torch.Tensor, ...], microbatches: int, step: Any = step) -> torch.Tensor:
    """Gradients of a batch in plain PyTorch, one microbatch after another; returns the loss."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), device=batch[0].device)
    for piece in zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True):
        loss = step(model, piece) / microbatches
        loss.backward()
        total += loss.detach()
    return total
