"""Programs that no pipeline trains as one process does: each is refused with its line and what to change."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import Entry, classes, generator, tokens
from .plain import classify, fit, labelled, regression
from .programs import WIDTH, Batch, mlp, vectors


class Graph(nn.Module):
    """Message passing along edges between the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.zeros_like(x).index_add(0, target, layer(x)[source]).relu()
        return self.head(x)


def graph(rows: int) -> Batch:
    source, target = torch.randint(0, rows, (2, rows), generator=generator())
    return {**vectors(rows), "source": source, "target": target}


class Bags(nn.Module):
    """An embedding bag with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(32, WIDTH, mode="mean"), mlp(WIDTH, 4)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bags(x, offsets))


def bags(rows: int) -> Batch:
    return {"x": tokens(5 * rows, 1, 32).flatten(), "offsets": 5 * torch.arange(rows), "y": classes(rows, 4)}


def residual(model: nn.Module, batch: Batch) -> Tensor:
    """The residual of a differential equation: the step differentiates the model."""
    x = batch["x"].detach().clone().requires_grad_()
    found = model(x)
    slope = torch.autograd.grad(found.sum(), x, create_graph=True)[0]
    return (slope + found).pow(2).mean()


def flagged(model: Any, batch: Batch) -> Tensor:
    """A tensor of the batch chooses the head."""
    head = model["classes"] if batch["task"][0] == 0 else model["regression"]
    return head(model["body"](batch["x"])).pow(2).mean()


def mixed_up(model: nn.Module, batch: Batch) -> Tensor:
    """Mixes rows by a number that Python draws."""
    share, order = random.random(), torch.randperm(len(batch["x"]))
    return F.cross_entropy(model(share * batch["x"] + (1 - share) * batch["x"][order]), batch["y"])


class Averaged(nn.Module):
    """A teacher that the forward averages."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), mlp().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
        return self.student(x) + self.teacher(x)


class SparseAdjacency(nn.Module):
    """Multiplies by a sparse matrix, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("adjacency", torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.adjacency, self.body(x).T).T


REFUSED: tuple[Entry, ...] = (
    Entry("Graph of rows", "torch", Graph,
          lambda model, batch: F.cross_entropy(model(batch["x"], batch["source"], batch["target"]), batch["y"]), graph,
          "indices that refer to rows of the batch", refusal="batch_dims="),
    Entry("Bags with offsets", "torch", Bags,
          lambda model, batch: F.cross_entropy(model(batch["x"], batch["offsets"]), batch["y"]), bags,
          "offsets into rows of the batch", refusal="batch_dims="),
    Entry("PINN", "torch", mlp, residual, regression, "the step differentiates the model",
          refusal="move this call and all other calls of the network"),
    Entry("Flagged task", "torch", lambda: nn.ModuleDict({"body": mlp(), "classes": mlp(), "regression": mlp()}),
          flagged, lambda rows: {**vectors(rows), "task": torch.zeros(rows)}, "a tensor in the batch chooses the head",
          refusal="give it as a Python number or text in the batch"),
    Entry("Random mixing", "torch", lambda: mlp(WIDTH, 4), mixed_up, vectors, "Python's random numbers",
          refusal="draws random numbers from Python or numpy"),
    Entry("Teacher in the forward", "torch", Averaged, fit, regression, "a parameter written by the forward",
          refusal="writes parameter"),
    Entry("Sparse embedding", "torch",
          lambda: nn.Sequential(nn.Embedding(32, WIDTH, sparse=True), nn.Flatten(), nn.Linear(10 * WIDTH, 4)),
          classify, labelled, "sparse gradients", refusal="give sparse=False"),
    Entry("Sparse matrix", "torch", SparseAdjacency, fit, regression, "a sparse buffer", float64=False,
          refusal="keep its indices and values"),
)  # fmt: skip
