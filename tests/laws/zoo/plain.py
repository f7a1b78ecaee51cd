"""Models of plain torch, each here for something that breaks automatic pipelining elsewhere."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .entry import Entry, classes, generator, tokens

WIDTH, LENGTH, VOCABULARY = 16, 10, 32
Batch = dict[str, Any]


def regression(rows: int) -> Batch:
    """Vectors to predict from vectors."""
    drawn = torch.randn(2, rows, WIDTH, generator=generator())
    return {"x": drawn[0], "y": drawn[1]}


def labelled(rows: int) -> Batch:
    """Tokens and a class for each row."""
    return {"x": tokens(rows, LENGTH, VOCABULARY), "y": classes(rows, 4)}


def series(rows: int) -> Batch:
    """Sequences of vectors, and a class for each."""
    return {"x": torch.randn(rows, LENGTH, WIDTH, generator=generator()), "y": classes(rows, 4)}


def fit(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Translator(nn.Module):
    """`nn.Transformer` between embeddings, its attention causal by flag or by a mask made in the forward."""

    def __init__(self, explicit_mask: bool) -> None:
        super().__init__()
        self.explicit_mask = explicit_mask
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if self.explicit_mask else None
        padding = (x == 2) if self.explicit_mask else None
        mask = None if mask is None else torch.isinf(mask)
        y = self.transformer(
            h, h, tgt_mask=mask, tgt_is_causal=True if self.explicit_mask else None, src_key_padding_mask=padding
        )
        return self.head(y.mean(1))


class Recurrent(nn.Module):
    """Three recurrent layers with dropout between them, and a head."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, num_layers=3, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.before(x).tanh())[0][:, -1])


class StraightThrough(torch.autograd.Function):
    """Rounds forward; lets the gradient through where the input was small."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, levels: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * levels).round() / levels

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1), None


class Quantized(nn.Module):
    """Linear layers with rounded activations, by a custom autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + StraightThrough.apply(layer(x).tanh(), 8.0)
        return x


class InPlace(nn.Module):
    """Writes activations and parts of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            y.mul_(0.5).add_(x)
            y[:, -1] = 0.0
            y[:, : WIDTH // 2].clamp_(min=-1.0)
            x = F.dropout(y.sigmoid_(), 0.1, self.training)
        return x


class MovingCentre(nn.Module):
    """Subtracts a running mean that its forward updates, and counts its calls in an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.centre: torch.Tensor
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.calls += 1
        self.centre.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return (y - self.centre).tanh()


class Vectors(nn.Module):
    """A vector-quantised bottleneck whose codebook is replaced by assignment to the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(-1)
        picked = self.codes[nearest]
        hits = F.one_hot(nearest, 8).to(z.dtype)
        means = hits.T @ z.detach() / hits.sum(0).clamp(min=1)[:, None]
        self.codes = torch.where(hits.sum(0)[:, None] > 0, 0.9 * self.codes + 0.1 * means, self.codes)
        return self.decoder(z + (picked - z).detach())


class Spectral(nn.Module):
    """Filters in the frequency domain: complex weights, complex tensors across a cut."""

    def __init__(self) -> None:
        super().__init__()
        modes = LENGTH // 2 + 1
        self.filters = nn.ParameterList(
            nn.Parameter(torch.randn(modes, WIDTH, dtype=torch.complex64) / WIDTH) for _ in range(3)
        )
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, mix in zip(self.filters, self.mix, strict=True):
            spectrum = torch.fft.rfft(x, dim=1)
            filtered = spectrum * (weight.to(spectrum.dtype) + 1)
            x = F.gelu(torch.fft.irfft(filtered, n=LENGTH, dim=1) + mix(x))
        return self.head(x.mean(1))


class Rotating(nn.Module):
    """Attention whose rotary embedding is a complex table, as in the first Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        angles = torch.outer(torch.arange(LENGTH), 1.0 / 100 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.table: torch.Tensor

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.table[:, None].to(pairs.dtype)).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for layer in self.qkv:
            q, k, v = (part.view(*h.shape[:2], 2, WIDTH // 2) for part in layer(h).chunk(3, -1))
            q, k, v = (part.transpose(1, 2) for part in (self.rotated(q), self.rotated(k), v))
            h = h + F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2)
        return self.head(h.mean(1))


class Sorting(nn.Module):
    """Integer and boolean tensors made early and used late: a sort's order, a mask, top-k positions."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores(x).squeeze(-1)
        order = scores.argsort(-1)
        positive = scores > 0
        best = scores.topk(3).indices
        h = x.gather(1, order[..., None].expand_as(x))
        for layer in self.layers:
            h = h + layer(h).relu()
        h = h.gather(1, order.argsort(-1)[..., None].expand_as(h))
        h = h.masked_fill(~positive[..., None], 0.0) + scores.sigmoid()[..., None]
        return self.head(h.mean(1) + h.gather(1, best[..., None].expand(-1, -1, WIDTH)).sum(1))


class Nested(nn.Module):
    """Takes and returns nested structures with optional parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(
        self, inputs: dict[str, torch.Tensor], scale: torch.Tensor | None = None, shift: torch.Tensor | None = None
    ) -> dict[str, Any]:
        hidden = [self.first(inputs["left"]), self.second(inputs["right"]).tanh()]
        if shift is not None:
            hidden[0] = hidden[0] + shift
        out = self.third(hidden[0] * hidden[1])
        return {"out": (out if scale is None else out * scale), "hidden": tuple(hidden), "nothing": None}


def nested_batch(rows: int) -> Batch:
    a, b, y, shift = torch.randn(4, rows, WIDTH, generator=generator()).unbind()
    return {"inputs": {"left": a, "right": b}, "shift": shift, "y": [y, None]}


def nested_step(model: nn.Module, batch: Batch) -> Any:
    result = model(batch["inputs"], shift=batch["shift"])
    loss = F.mse_loss(result["out"], batch["y"][0]) + 0.1 * result["hidden"][1].pow(2).mean()
    return loss, {"size": result["hidden"][0].norm(), "parts": len(result["hidden"])}


class LongSkips(nn.Module):
    """The embedding and the first layer's output are read by every later layer, several stages away."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = early = self.embedding(x)
        for layer in self.layers:
            h = h + F.dropout(layer(torch.cat((h, early), -1)).relu(), 0.1, self.training)
        return self.head(h + early).mean(1)[:, :4]


class Halting(nn.Module):
    """Refines until its own output is small: how often is decided by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            update = self.step(x).tanh()
            x = x + 0.5 * update
            if update.abs().mean() < 0.4:
                break
        return x


class DataDependent(nn.Module):
    """A network with a block in its middle whose control flow depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.halting = Halting()
        self.after = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.halting(self.before(x)))


class Routed(nn.Module):
    """Experts that each get the rows sent to them: shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return x + out


def talkative_step(model: nn.Module, batch: Batch) -> Any:
    """Prints, logs and returns metrics, some of them as numbers."""
    out = model(batch["x"])
    loss = F.mse_loss(out, batch["y"])
    print(f"loss {loss.item():.4f}")
    size = math.sqrt(WIDTH) * out.detach().norm()
    return loss, {"size": size, "loss": loss.item(), "rows": len(out)}


PLAIN: tuple[Entry, ...] = (
    Entry("nn.Transformer", "torch", lambda: Translator(False), classify, labelled),
    Entry("nn.Transformer, masks", "torch", lambda: Translator(True), classify, labelled, "masks made in the forward"),
    Entry("LSTM", "torch", lambda: Recurrent(nn.LSTM), classify, series),
    Entry("GRU", "torch", lambda: Recurrent(nn.GRU), classify, series),
    Entry("Quantized", "torch", Quantized, fit, regression, "a custom autograd function"),
    Entry("In place", "torch", InPlace, fit, regression, "activations written in place"),
    Entry("Moving centre", "torch", lambda: nn.Sequential(MovingCentre(), nn.Linear(WIDTH, WIDTH), MovingCentre()), fit,
          regression, "buffers updated in the forward"),
    Entry("Vector quantiser", "torch", lambda: nn.Sequential(Quantized(), Vectors(), Quantized()), fit, regression,
          "a buffer replaced by assignment"),
    Entry("Spectral", "torch", Spectral, classify, series, "complex parameters"),
    Entry("Rotary by complex numbers", "torch", Rotating, classify, labelled, "complex tables and views"),
    Entry("Sorting", "torch", Sorting, classify, series, "integers and booleans across the cut"),
    Entry("Nested", "torch", Nested, nested_step, nested_batch, "nested outputs, optional inputs, metrics"),
    Entry("Long skips", "torch", LongSkips, classify, labelled, "a tensor that crosses several stages"),
    Entry("Halting", "torch", DataDependent, fit, regression, "a data-dependent graph break"),
    Entry("Routed", "torch", lambda: nn.Sequential(Quantized(), Routed(), Quantized()), fit, regression,
          "shapes that depend on values"),
    Entry("Talkative", "torch", Quantized, talkative_step, regression, "a step that prints and returns numbers"),
)  # fmt: skip
