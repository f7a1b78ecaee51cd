"""Steps that refer to the model's parameters and buffers by a variable, a container or a key outside of its modules."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ....laws.programs import Program, difference, names_a_line, refusal
from ....support.registry import Registry

SIZES = (4, 4)
cases = Registry()


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def fit(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def regularised(model: nn.Module, penalty) -> Program:
    return Program(model, lambda m, b: fit(m, b) + 0.1 * penalty(m), sizes=SIZES)


def squares(parameters):
    return sum(p.square().sum() for p in parameters)


@cases
def list_of_parameters():
    model = chain()
    held = list(model.parameters())
    return regularised(model, lambda _: squares(held))


@cases
def pairs_of_names_and_parameters():
    model = chain()
    held = tuple(model.named_parameters())
    return regularised(model, lambda _: squares(p for name, p in held if name.endswith("weight")))


@cases
def one_parameter():
    model = chain()
    weight = model[0].weight
    return regularised(model, lambda _: weight.abs().sum())


@cases
def groups_of_an_optimizer():
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return regularised(model, lambda _: squares(p for group in optimizer.param_groups for p in group["params"]))


@cases
def set_of_parameters():
    model = chain()
    exempt = {model[0].bias, model[2].bias}
    return regularised(model, lambda m: squares(p for p in m.parameters() if p not in exempt))


@cases
def identities_of_parameters():
    model = chain()
    exempt = {id(model[0].bias): True}
    return regularised(model, lambda m: squares(p for p in m.parameters() if id(p) not in exempt))


@cases
def importance_by_parameter():
    model = chain()
    importance = {p: torch.full_like(p, 2.0) for p in model.parameters()}
    before = {p: p.detach().clone() for p in model.parameters()}
    return regularised(model, lambda m: sum((importance[p] * (p - before[p])).square().sum() for p in m.parameters()))


@cases
def loop_over_the_keys():
    model = chain()
    importance = dict.fromkeys(model.parameters(), 2.0)
    return regularised(model, lambda m: sum(weight * p.square().sum() for p, weight in importance.items()))


class Shares(nn.Module):
    """A layer that has the weight of another one in a list, and in an attribute that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shared = [self.first.weight]
        object.__setattr__(self, "same", self.first.weight)

    def forward(self, x):
        return F.linear(F.linear(self.last(x).tanh(), self.shared[0]), self.same) + self.first(x)


@cases
def list_in_a_module():
    torch.manual_seed(0)
    return Program(Shares().double(), fit, sizes=SIZES)


@cases
def buffer_that_the_forward_writes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    mean = model[1].running_mean
    return Program(model, lambda m, b: fit(m, b) * (1 + mean.abs().mean()), sizes=SIZES)


@cases
def hook_with_a_parameter():
    model = chain()
    weight = model[0].weight
    model[2].register_forward_hook(lambda module, given, result: F.linear(result, weight))
    return Program(model, fit, sizes=SIZES)


@pytest.mark.parametrize("make", cases.values(), ids=list(cases))
def test_references_to_the_models_tensors_equal_eager(make):
    assert difference(make) < 1e-9
    program = make()
    assert all(p.grad is None for p in program.model.parameters())


def test_references_are_restored_after_the_capture():
    held = []

    def make():
        model = chain()
        own = {p: name for name, p in model.named_parameters()}
        held.append((own, list(own), model))
        return regularised(model, lambda m: squares(p for p in own if own[p] != "0.bias"))

    assert difference(make) < 1e-9
    for own, keys, model in held:
        assert all(key is p for key, p in zip(own, model.parameters(), strict=True))
        assert all(key is p for key, p in zip(keys, model.parameters(), strict=True))


gradients = Registry()


@gradients
def gradient_in_a_branch():
    return lambda m, b: fit(m, b) * (1 if m[0].weight.grad is None else 2)


@gradients
def gradient_norm():
    return lambda m, b: fit(m, b) + sum(p.grad.norm() for p in m.parameters() if p.grad is not None)


@gradients
def zero_grad():
    def step(m, b):
        m.zero_grad()
        return fit(m, b)

    return step


@gradients
def clipping():
    def step(m, b):
        loss = fit(m, b)
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        return loss

    return step


@gradients
def gradient_that_is_deleted():
    def step(m, b):
        m[0].weight.grad = None
        return fit(m, b)

    return step


@pytest.mark.parametrize("make", gradients.values(), ids=list(gradients))
def test_step_that_uses_gradients_of_earlier_microbatches_is_refused_with_its_line(make):
    message = refusal(lambda: Program(chain(), make()))
    assert names_a_line(message, __file__)
    assert "gradient of parameter '0.weight'" in message
