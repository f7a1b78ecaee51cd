"""Programs of plain torch whose layers do something unusual: routing, computed weights, checks, gradients inside."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .entry import Entry, classes, images
from .plain import classify, fit, labelled, regression
from .programs import VOCABULARY, WIDTH, Batch, mlp, vectors


class Capsules(nn.Module):
    """Routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.primary, self.weight = nn.Linear(WIDTH, 32), nn.Parameter(0.1 * torch.randn(8, 4, 4, 6))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bni,nkij->bnkj", self.primary(x).view(-1, 8, 4), self.weight)
        logits = torch.zeros(votes.shape[:3], dtype=x.dtype)
        for _ in range(3):
            pooled = (logits.softmax(2)[..., None] * votes).sum(1)
            size = pooled.pow(2).sum(-1, keepdim=True)
            pooled = size / (1 + size) * pooled / (size + 1e-8).sqrt()
            logits = logits + (votes * pooled[:, None]).sum(-1)
        return pooled.norm(dim=-1)


class Hyper(nn.Module):
    """A network that makes each row's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.head = mlp(WIDTH, 8 * WIDTH), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.bmm(self.weights(x).view(-1, 8, WIDTH), x[..., None]).squeeze(-1).relu())


class LowRank(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(0.1 * torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen(x) + F.dropout(x, 0.1, self.training) @ self.down.T @ self.up.T).tanh()


class Checked(nn.Module):
    """Looks at values only to raise an error."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if y.max() >= 4:
            raise ValueError(f"a class of {y.max()}")
        hidden = self.body(x)
        if torch.isnan(hidden).any() or hidden.abs().max().item() > 1e6:
            raise RuntimeError("the activations explode")
        return self.head(hidden)


class Parametrized(nn.Module):
    """Weights that are computed: orthogonal by two maps, normalised, and of bounded norm."""

    def __init__(self) -> None:
        super().__init__()
        made = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        parametrizations.orthogonal(made[0])
        parametrizations.orthogonal(made[1], orthogonal_map="cayley")
        parametrizations.weight_norm(made[2])
        parametrizations.spectral_norm(made[3])
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Mapped(nn.Module):
    """A Jacobian in the middle, by `torch.func`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(self.inner))(x).sum(1)


class Energy(nn.Module):
    """Descends an energy by its gradient, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(WIDTH, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            return x - 0.1 * torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def diffuse(model: nn.Module, batch: Batch) -> Tensor:
    """A training step of denoising diffusion."""
    x = batch["x"]
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100, dtype=x.dtype), 0)[torch.randint(0, 100, (len(x),))]
    kept, noise = kept.view(-1, 1, 1, 1), torch.randn_like(x)
    return F.mse_loss(model(kept.sqrt() * x + (1 - kept).sqrt() * noise), noise)


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5), self.bias, padding=self.padding)


def denoiser() -> nn.Module:
    return nn.Sequential(
        Standardized(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), Standardized(8, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 3, 1),
    )  # fmt: skip


class Warped(nn.Module):
    """Samples an image where a convolution says."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Conv2d(3, 2, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        height, width = (torch.linspace(-1, 1, size, dtype=x.dtype) for size in x.shape[2:])
        grid = torch.stack(torch.meshgrid(height, width, indexing="ij")[::-1], -1)
        moved = F.grid_sample(x, grid + 0.1 * self.offsets(x).permute(0, 2, 3, 1).tanh(), align_corners=True)
        return self.body(moved).mean((2, 3))


class Memory(nn.Module):
    """Reads a memory several times."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values, self.query = (nn.Embedding(VOCABULARY, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        keys, values, state = self.keys(x), self.values(x), self.query(x).sum(1)
        for _ in range(3):
            state = state + torch.einsum("bn,bnd->bd", torch.einsum("bnd,bd->bn", keys, state).softmax(-1), values)
        return self.head(state)


def tasks(model: Any, batch: Batch) -> Tensor:
    """A text in the batch chooses the head."""
    found = model[batch["task"]](model["body"](batch["x"]))
    return F.cross_entropy(found, batch["y"]) if batch["task"] == "classes" else found.pow(2).mean()


def shared_body() -> nn.Module:
    return nn.ModuleDict({"body": mlp(), "classes": nn.Linear(WIDTH, 4), "regression": nn.Linear(WIDTH, 1)})


LAYERS: tuple[Entry, ...] = (
    Entry("Capsules", "torch", Capsules, classify, vectors, "routing by agreement, einsum"),
    Entry("Hypernetwork", "torch", Hyper, classify, vectors, "weights of each row"),
    Entry("LoRA", "torch", lambda: nn.Sequential(LowRank(), LowRank(), LowRank()), fit, regression,
          "frozen layers with adapters"),
    Entry("Checked", "torch", Checked, lambda model, batch: F.cross_entropy(model(batch["x"], batch["y"]), batch["y"]),
          vectors, "conditions that only raise errors"),
    Entry("Parametrized", "torch", lambda: nn.Sequential(mlp(), Parametrized(), mlp()), fit, regression,
          "weights that are computed, by linear solves among others"),
    Entry("Jacobian", "torch", lambda: nn.Sequential(mlp(), Mapped(), mlp()), fit, regression,
          "torch.func in a module"),
    Entry("Mapped step", "torch", mlp, lambda model, batch: F.mse_loss(torch.vmap(model)(batch["x"]), batch["y"]),
          regression, "torch.vmap around the model"),
    Entry("Energy", "torch", lambda: nn.Sequential(mlp(), Energy(), mlp()), fit, regression,
          "a gradient within the forward"),
    Entry("Diffusion step", "torch", denoiser, diffuse, lambda rows: {"x": images(rows, 8)},
          "random timesteps, standardised weights"),
    Entry("Warped images", "torch", Warped, classify, lambda rows: {"x": images(rows, 8), "y": classes(rows, 4)},
          "a sampled grid"),
    Entry("Memory network", "torch", Memory, classify, labelled, "embeddings read several times"),
    Entry("Task of the batch", "torch", shared_body, tasks, lambda rows: {**vectors(rows), "task": "classes"},
          "a text in the batch chooses the head"),
)  # fmt: skip
