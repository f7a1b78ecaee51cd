"""Models of which each step uses some parts, chosen by a Python value: the example's step does not use the others."""

import copy
import functools

import torch
from attrs import evolve
from panpipe.core.capture.batch.batch_dims import AUTO
from panpipe.core.policies.sharding import with_level
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.session import Session
from panpipe.runtimes.trainer import Trainer
from panpipe.runtimes.training.agreement import compare_initial_weights
from panpipe.runtimes.update.training import Training
from panpipe.runtimes.weights import weights_from
from torch import nn
from torch.nn import functional as F

from ..cuts import even_plan, irregular_plan
from ..registry import Registry

WIDTH = 6
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)


def batches():
    """Two batches of four samples for each sign of the mean; in the last two, one microbatch has the other sign."""
    generator = torch.Generator().manual_seed(7)
    signs = [(1, 1), (-1, -1), (-1, -1), (1, 1), (-1, 1), (1, -1)]
    found = []
    for first, second in signs:
        x = torch.randn(4, WIDTH, dtype=torch.float64, generator=generator).abs()
        x[:2] *= first
        x[2:] *= second
        found.append({"x": x, "y": torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)})
    return found


def without_pipeline(model, step, data, optimizer, updates=None, pieces=2):
    """The parameters after a loop of eager PyTorch over the same microbatches, ``pieces`` a batch."""
    made = optimizer(model.parameters())
    waiting = 0
    for i, batch in enumerate(data):
        before(model, i)
        parts = zip(*(value.chunk(pieces) for value in batch.values()), strict=True)
        for part in parts:
            (step(model, dict(zip(batch, part, strict=True))) / pieces).backward()
        waiting += 1
        if updates is None or updates[i]:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= waiting
            made.step()
            made.zero_grad()
            waiting = 0
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def before(model, number):
    """What the model does before the step of this number."""
    if hasattr(model, "before"):
        model.before(number)


def distances(team, make, optimizer, updates=None, shard="none", placement=None, **plan):
    """Name of a parameter that this process has → its distance from eager PyTorch's after training.

    The plan has one stage on each device, or the stages of a placement.
    """
    model, step = make()
    data = batches()
    wanted = without_pipeline(copy.deepcopy(model), step, data, optimizer, updates, 2 * team.replicas)
    own = [{name: value.chunk(team.replicas)[team.replica] for name, value in batch.items()} for batch in data]
    example = Example.capture(model, step, own[0], 2, AUTO, "cpu")
    if placement is None:
        even = even_plan(example.operators, team.size, 2, **plan)
    else:
        even = irregular_plan(example.operators, placement, 2)
    even = evolve(even, mesh=team.mesh)
    even = even if shard == "none" else with_level(even, shard)
    source = weights_from(None, model, 0)
    pipe = Pipeline(Session(Trainer(example, even, team, Training(optimizer=optimizer))))  # the caller closes its team
    pipe._session.load(source, compare_initial_weights(team, model, source))
    if hasattr(model, "asks"):
        model.asks = team.replica == 0
    for i, batch in enumerate(own):
        before(model, i)
        pipe.step(batch, update=updates is None or updates[i])
    found = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    return {name: (parameter - wanted[name]).abs().max().item() for name, parameter in found.items()}


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
