"""Which optimizers replicas may share: those whose update of an element depends on that element alone."""

import functools

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.update.trials import check_elementwise
from torch import nn

O = torch.optim  # noqa: E741
STAGES = [
    {"embed.weight": nn.Parameter(torch.zeros(300, 40)), "norm.weight": nn.Parameter(torch.zeros(40))},
    {"head.weight": nn.Parameter(torch.zeros(40, 40)), "scale": nn.Parameter(torch.zeros(()))},
]


class Lion(O.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    held = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.add_((held * 0.9 + p.grad * 0.1).sign(), alpha=-group["lr"])
                    held.lerp_(p.grad, 0.01)


class Lars(Lion):
    """A factor of the parameter's norm and its gradient's."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * p.norm() / (p.grad.norm() + 1e-9), alpha=-group["lr"])


class LarsOfMatrices(Lars):
    """The same for large matrices, and SGD for others."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    factor = p.grad.norm() if p.numel() > 5_000 else 1.0
                    p.add_(p.grad * factor, alpha=-group["lr"])


class Noisy(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=-group["lr"])


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
