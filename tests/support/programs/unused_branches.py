"""Steps with layers that run before a condition on a value, and whose results only one branch uses."""

import copy
import functools
import itertools

import torch
from attrs import evolve
from panpipe.core.capture.batch.batch_dims import AUTO
from panpipe.core.plan.sharding import LEVELS, with_level
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.optimizer.training import Training
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.training.initial_weights import compare_initial_weights
from panpipe.runtimes.weights import weights_from
from torch import nn
from torch.nn import functional as F

from ..cuts import even_plan, irregular_plan
from ..registry import Registry

WIDTH = 6
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
named_programs = Registry()


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
    alone = asking_in_turn(step) if hasattr(model, "asks") and team.replicas > 1 else step
    wanted = without_pipeline(copy.deepcopy(model), alone, data, optimizer, updates, 2 * team.replicas)
    own = [{name: value.chunk(team.replicas)[team.replica] for name, value in batch.items()} for batch in data]
    example = Example.capture(model, step, own[0], 2, AUTO, "cpu")
    if placement is None:
        even = even_plan(example.operators, team.size, 2, **plan)
    else:
        even = irregular_plan(example.operators, placement, 2)
    even = evolve(even, mesh=team.mesh)
    even = even if shard == "none" else with_level(even, shard)
    source = weights_from(None, model, 0)
    pipe = Pipeline(example, even, team, Training(optimizer=optimizer))  # the caller closes its team
    pipe.load(source, compare_initial_weights(team, model, source))
    if hasattr(model, "asks"):
        model.asks = team.replica == 0
    for i, batch in enumerate(own):
        before(model, i)
        pipe.step(batch, update=updates is None or updates[i])
    found = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    return {name: (parameter - wanted[name]).abs().max().item() for name, parameter in found.items()}


def over_ranks(team):
    """The largest distances over ranks, by program, optimizer and what replicas share."""
    shared = LEVELS if team.replicas > 1 else ["none"]
    names = ("module_with_a_branch_after_another_one", "tied_weight_of_one_branch", "condition_of_one_replica")
    found = {}
    for name in names:
        for shard in shared:
            for kind, optimizer in (("AdamW", ADAM), ("SGD", SGD)):
                distance = distances(team, named_programs[name], optimizer, shard=shard)
                found[f"{name}, {kind}, {shard}"] = max(distance.values())
    return found


def asking_in_turn(step):
    """The step in one process where of four microbatches the first two, those of replica 0, ask for the condition."""
    count = itertools.count()

    def each(model, batch):
        model.asks = next(count) % 4 < 2
        return step(model, batch)

    return each


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def layers(depth=1):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*parts).double()


class Branching(nn.Module):
    """Two ways; the second one's result is used only where the mean of the input is positive."""

    def __init__(self, depth):
        super().__init__()
        self.first, self.always, self.sometimes = layers(), layers(depth), layers(depth)

    def forward(self, x):
        h = self.first(x)
        always, sometimes = self.always(h), self.sometimes(h)
        if x.mean() > 0:
            return always + sometimes
        return always


@named_programs
def layers_before_the_branch():
    return Branching(1), loss


@named_programs
def several_layers_before_the_branch():
    return Branching(3), loss


@named_programs
def branch_in_the_step():
    def step(m, b):
        h = m.first(b["x"])
        always, sometimes = m.always(h), m.sometimes(h)
        error = F.mse_loss(always, b["y"])
        if b["x"].mean().item() > 0:
            error = error + sometimes.square().mean()
        return error

    return Branching(2), step


class Choice(nn.Module):
    """Chooses between two inputs, with a layer of its own for each."""

    def __init__(self):
        super().__init__()
        self.left, self.right = layers(), layers()

    def forward(self, key, a, b):
        if key.mean() > 0:
            return self.left(a), b * 2
        return self.right(b), a * 2


class Chain(nn.Module):
    """A module with a branch, of whose results a second branch uses one or two."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.choice, self.end = layers(), layers(), Choice(), layers()

    def forward(self, x):
        one, two = self.choice(x, self.a(x), self.b(x))
        return self.end(one), two


@named_programs
def result_of_a_module_that_the_loss_never_uses():
    return Chain(), lambda m, b: F.mse_loss(m(b["x"])[0], b["y"])


class Perhaps(nn.Module):
    """A sum of two inputs, or the first one alone."""

    def forward(self, key, one, two):
        return one + two if key.mean() > 0.2 else one


class TwoConditions(nn.Module):
    """A module with a branch, of whose results a later one uses one or two."""

    def __init__(self):
        super().__init__()
        self.chain, self.between, self.perhaps, self.end = Chain(), layers(), Perhaps(), layers()

    def forward(self, x):
        one, two = self.chain(x)
        return self.end(self.perhaps(x, one, self.between(two)))


@named_programs
def module_with_a_branch_after_another_one():
    return TwoConditions(), loss


class Tied(nn.Module):
    """A weight that layers at both ends read, for one branch alone."""

    def __init__(self):
        super().__init__()
        self.a, self.middle, self.c = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))
        self.always = layers(2)
        self.c.weight = self.a.weight

    def forward(self, x):
        sometimes = self.c(self.middle(self.a(x)).tanh())
        always = self.always(x)
        if x.mean() > 0:
            return always + sometimes
        return always


@named_programs
def tied_weight_of_one_branch():
    torch.manual_seed(0)
    return Tied(), loss


class Asking(Branching):
    """The same, with a Python value that decides whether there is a condition."""

    def __init__(self):
        super().__init__(2)
        self.asks = True

    def forward(self, x):
        return super().forward(x) if self.asks else self.always(self.first(x))


@named_programs
def condition_of_one_replica():
    return Asking(), loss
