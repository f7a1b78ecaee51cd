"""GPT as the papers train it (Megatron-LM), with attention written out or as one flash kernel.

Written out, a layer saves about sb(34h + 5as) bytes in half precision (Korthikanti et al., arXiv 2205.05198, section
4.1): s the sequence, b the samples, h the hidden size, a the heads. The flash kernel saves no probabilities.
"""

import math

import torch
from attrs import frozen
from torch import nn
from torch.nn import functional as F

DROPOUT = 0.1


@frozen
class Shape:
    """Sizes of a model and of its microbatches; ``flash``: whether attention is one kernel."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    samples: int
    vocabulary: int = 50304
    flash: bool = False


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
    """Causal attention written out; ``ahead`` marks the tokens that are not seen."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(2, 3)
    return F.dropout(F.softmax(scores.masked_fill(ahead, -1e4), -1), DROPOUT) @ v


class Layer(nn.Module):
    """One transformer layer, with a layer norm before attention and before the feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, self.heads, self.flash = shape.hidden, shape.heads, shape.flash
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, 2)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.flash else attention(q, k, v, ahead)
        x = x + F.dropout(self.out(seen.transpose(1, 2).reshape(rows, length, width)), DROPOUT)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), DROPOUT)


class Megatron(nn.Module):
    """The whole model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.hidden)
        self.place = nn.Embedding(shape.sequence, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        ahead = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = F.dropout(self.token(tokens) + self.place(torch.arange(length, device=tokens.device)), DROPOUT)
        for layer in self.layers:
            x = layer(x, ahead)
        return self.head(self.norm(x))


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Loss of predicting each token from those before it."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def make(shape: Shape) -> tuple[nn.Module, torch.Tensor]:
    """The model in half precision, without values, and one microbatch."""
    with torch.device("meta"):
        model = Megatron(shape).to(torch.bfloat16)
        batch = torch.zeros(shape.samples, shape.sequence + 1, dtype=torch.long)
    return model, batch
