"""Models of which each step uses some parts, chosen by a Python value: the example's step does not use the others."""

import functools

import torch
from panpipe.runtimes.launch.team import Team
from torch import nn
from torch.nn import functional as F

from ..models import Case
from ..parity import Trained, largest
from ..registry import Registry

WIDTH = 6
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
TASKS = (0, 1, 1, 0, 1, 0)
"""The task of each batch."""

part_programs = Registry()


def points(rows, dtype, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, WIDTH, dtype=dtype, generator=generator) for name in ("x", "y")}


def distance_over_tasks(team: Team, make, optimizer, shard="none"):
    """How far losses, gradients and parameters here are from those of one process at most, over all tasks."""
    trained = Trained(team, Case(make, fit, points), 4, 2, shard=shard, optimizer=optimizer)
    found = []
    for number, task in enumerate(TASKS):
        trained.alone.task = trained.pipe._session.model.task = task
        given = [points(4, torch.float64, 10 * number + replica) for replica in range(team.replicas)]
        found += trained.step_on(given).values()
    return largest(found)


def layer():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Tasks(nn.Module):
    """A model whose attribute ``task`` is the batch's."""

    def __init__(self):
        super().__init__()
        self.task = 0


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


def seeded(kind):
    """Makes the model in a dtype."""

    def make(dtype):
        torch.manual_seed(0)
        return kind().to(dtype)

    make.__name__ = kind.__name__
    return make


for kind in (Heads, HeadBeforeItsSibling, Encoders, Adapters, DeeperLater):
    part_programs(seeded(kind))


def parts_over_ranks(team):
    """The distances from one process by program, optimizer and what replicas share."""
    shared = ["none", "optimizer"] if team.replicas > 1 else ["none"]
    return {
        f"{name}, {kind}, {shard}": distance_over_tasks(team, part_programs[name], optimizer, shard)
        for name in ("Heads", "Adapters")
        for shard in shared
        for kind, optimizer in (("AdamW", ADAM), ("SGD", SGD))
    }
