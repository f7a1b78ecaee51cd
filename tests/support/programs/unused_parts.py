"""Models of which each step uses some parts, chosen by a Python value: the example's step does not use the others."""

import torch
from torch import nn
from torch.nn import functional as F

from ..registry import Registry
from .unused_branches import ADAM, SGD, WIDTH, distances

part_programs = Registry()
TASKS = (0, 1, 1, 0, 1, 0)
"""The task of each batch."""


def layer():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Tasks(nn.Module):
    """A model whose attribute ``task`` is the batch's."""

    def __init__(self):
        super().__init__()
        self.task = 0

    def before(self, number):
        self.task = TASKS[number]


class Heads(Tasks):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(layer(), layer())
        self.heads = nn.ModuleList(nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x):
        return self.heads[self.task](self.body(x))


class HeadBeforeItsSibling(Tasks):
    """The unused head is defined before the used one, and both are modules of the model itself."""

    def __init__(self):
        super().__init__()
        self.body, self.second, self.first = layer(), nn.Linear(WIDTH, WIDTH), layer()

    def forward(self, x):
        return (self.second if self.task else self.first)(self.body(x))


class Encoders(Tasks):
    def __init__(self):
        super().__init__()
        self.second, self.first, self.body = layer(), layer(), nn.Sequential(layer(), layer())

    def forward(self, x):
        return self.body((self.second if self.task else self.first)(x))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x * self.weight


class Adapters(Tasks):
    """An adapter after each layer for the second task alone, and a weight at the end."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"main": layer(), "adapter": layer()}) for _ in range(3))
        self.scale = Scale()

    def forward(self, x):
        for each in self.layers:
            x = each["main"](x)
            if self.task:
                x = x + each["adapter"](x)
        return self.scale(x) if self.task else x


class Early(Tasks):
    """A weight that belongs to the model itself, before all its layers, and that the last line uses."""

    def __init__(self):
        super().__init__()
        self.scale, self.layers = nn.Parameter(torch.tensor(0.5)), nn.Sequential(*(layer() for _ in range(4)))

    def forward(self, x):
        x = self.layers(x)
        return x * self.scale if self.task else x


class DeeperLater(Tasks):
    """A network that grows by a layer in its middle; the new one stays frozen in part."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.layers[2][0].bias.requires_grad_(False)

    def forward(self, x):
        for number, each in enumerate(self.layers):
            x = each(x) if number != 2 or self.task else x
        return x


def fit(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def _program(kind):
    def make():
        torch.manual_seed(0)
        return kind().double(), fit

    make.__name__ = kind.__name__
    part_programs(make)


for kind in (Heads, HeadBeforeItsSibling, Encoders, Adapters, DeeperLater):
    _program(kind)


def parts_over_ranks(team):
    """The largest distances from eager PyTorch over ranks, by program, optimizer and what replicas share."""
    shared = ["none", "optimizer"] if team.replicas > 1 else ["none"]
    return {
        f"{name}, {kind}, {shard}": max(
            distances(team, part_programs[name], optimizer, shard=shard).values(), default=0.0
        )
        for name in ("Heads", "Adapters")
        for shard in shared
        for kind, optimizer in (("AdamW", ADAM), ("SGD", SGD))
    }
