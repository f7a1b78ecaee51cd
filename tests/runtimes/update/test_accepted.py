"""Which optimizers stages and replicas accept: elementwise ones, separable ones, and one over the whole model."""

import copy
import functools

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.update.trials import check_elementwise
from torch import nn

from ...laws.grouped import grouped

# Which optimizers replicas may share: those whose update of an element depends on that element alone.


O = torch.optim  # noqa: E741
STAGES = [
    {"embed.weight": nn.Parameter(torch.zeros(300, 40)), "norm.weight": nn.Parameter(torch.zeros(40))},
    {"head.weight": nn.Parameter(torch.zeros(40, 40)), "scale": nn.Parameter(torch.zeros(()))},
]


class OfEach(O.Optimizer):
    """Updates one parameter after the other, by `update`."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"])


class Lion(OfEach):
    def update(self, p, lr):
        held = self.state[p].setdefault("m", torch.zeros_like(p))
        p.add_((held * 0.9 + p.grad * 0.1).sign(), alpha=-lr)
        held.lerp_(p.grad, 0.01)


class Lars(OfEach):
    """A factor of the parameter's norm and its gradient's."""

    def update(self, p, lr):
        p.add_(p.grad * p.norm() / (p.grad.norm() + 1e-9), alpha=-lr)


class LarsOfMatrices(OfEach):
    """The same for large matrices, and SGD for others."""

    def update(self, p, lr):
        factor = p.grad.norm() if p.numel() > 5_000 else 1.0
        p.add_(p.grad * factor, alpha=-lr)


class Noisy(OfEach):
    def update(self, p, lr):
        p.add_(torch.randn_like(p), alpha=-lr)


class Holding(O.SGD):
    """Steps the tensors that it was created with."""

    def __init__(self, params, lr=0.01):
        params = list(params)
        super().__init__(params, lr=lr)
        self.own = [p for _, p in params]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.own:
            if p.grad is not None:
                p.sub_(p.grad)


ELEMENTWISE = {
    "SGD": functools.partial(O.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": O.Adam, "AdamW": O.AdamW, "fused": functools.partial(O.AdamW, fused=True), "Adagrad": O.Adagrad,
    "RMSprop": functools.partial(O.RMSprop, centered=True), "Adadelta": O.Adadelta, "Adamax": O.Adamax,
    "NAdam": O.NAdam, "RAdam": O.RAdam, "Rprop": O.Rprop, "ASGD": O.ASGD, "Lion": Lion,
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted(name):
    check_elementwise(ELEMENTWISE[name], STAGES)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (O.Adafactor, "updates 'embed.weight' differently if each replica steps a part of it"),
        (Lars, "Lars updates 'embed.weight' differently"),
        (LarsOfMatrices, "LarsOfMatrices updates 'embed.weight' differently"),
        (Noisy, "Noisy updates 'embed.weight' differently"),
        (Holding, "Holding updates 'embed.weight' differently"),
        (lambda named: O.Muon([p for _, p in named if p.ndim == 2]), "Muon cannot step a part|Muon updates"),
    ],
)
def test_other_optimizers_are_refused_with_the_reason(make, reason):
    with pytest.raises(RequestError, match=reason) as refusal:
        check_elementwise(make, STAGES)
    assert "shard='none'" in str(refusal.value)


# An optimizer over the whole model, as plain PyTorch has it, in place of a function.


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def step(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


BATCH = {"x": torch.randn(8, 8), "y": torch.arange(8) % 4}


def groups_of(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed, "weight_decay": 0.3}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


def pipeline_with(model, optimizer):
    return panpipe.pipeline(
        model, step, BATCH, optimizer=optimizer, microbatches=2, **grouped(contest=False, cache=False, progress=False)
    )


def test_groups_options_and_schedulers_are_those_of_one_process():
    model = made()
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(groups_of(each), lr=0.05, betas=(0.8, 0.9)) for each in (model, alone)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
    with pipeline_with(model, optimizers[0]) as pipe:
        for _ in range(3):
            pipe.step(BATCH)
            step(alone, BATCH).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            for scheduler in schedulers:
                scheduler.step()
        assert pipe.metrics.learning_rates == [0.00625, 0.00625]
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_options_of_a_checkpoint_are_those_of_the_optimizer():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipeline_with(model, optimizer) as pipe:
        optimizer.param_groups[0]["lr"] = 0.025
        pipe.step(BATCH)
        state = copy.deepcopy(pipe.state_dict())
        optimizer.param_groups[0]["lr"] = 0.1
        pipe.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.025
        assert pipe.metrics.learning_rates == [0.025]


def test_its_own_step_is_refused():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipeline_with(model, optimizer) as pipe:
        pipe.step(BATCH)
        optimizer.zero_grad()
        with pytest.raises(panpipe.RequestError, match=r"SGD\.step\(\) would update a second time"):
            optimizer.step()


class Slow(torch.optim.SGD):
    """An optimizer with a value that its groups do not have."""

    def __init__(self, params, lr=0.1, pace=1.0):
        super().__init__(params, lr=lr)
        self.pace = pace


def test_what_its_groups_do_not_have_is_refused_with_the_function_to_give():
    model = made()
    with pytest.raises(panpipe.RequestError, match=r"pace cannot be read.*optimizer=lambda p: Slow\(p, lr=0\.2"):
        pipeline_with(model, Slow(model.parameters(), 0.2, 0.5))
    with pytest.raises(panpipe.RequestError, match="that the model does not have"):
        pipeline_with(model, torch.optim.SGD(made().parameters(), lr=0.1))
