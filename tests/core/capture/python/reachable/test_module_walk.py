"""What a step reaches from a module and from a class."""

import functools

import pytest
import torch
from panpipe.core.capture.python.reachable.reach import reach
from torch import nn


class Scaled(nn.Module):
    factor = 2
    unused = 5

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("none", None)
        self.extra = 7

    @staticmethod
    def shift(x):
        return x + 1

    @classmethod
    def twice(cls, x):
        return 2 * x

    @property
    def half(self):
        return self.factor / 2

    @functools.cached_property
    def third(self):
        return self.factor / 3

    @functools.lru_cache  # noqa: B019
    def cached(self):
        return 1

    def other(self, x):
        return x

    def forward(self, x):
        return self.shift(self.linear(x)) * self.factor * self.half * self.third * self.cached() + self.twice(x)


def step(model, batch):
    return model(batch).sum()


def unchanged(found):
    """Whether dicts have the same sizes and orders, and probes the same results."""
    sizes = all(len(held) == size for held, size in found.sizes)
    orders = all(list(held) == keys for held, keys in found.orders)
    return sizes and orders and all(probe() == result for probe, result in found.probes)


@pytest.fixture
def model():
    return Scaled()


@pytest.fixture
def reached(model):
    return reach(model, step)


def test_module_is_compared_by_class_mode_parameters_and_buffers(model, reached):
    values = reached.values
    assert values["model"] == ("a module", f"{Scaled.__module__}.Scaled")
    assert values["model.training"] == ("bool", True)
    assert values["model.linear.weight"] == ((2, 2), torch.float32, "linear.weight")
    assert values["model.linear.weight.requires_grad"] == ("bool", True)
    assert values["model.mean"] == ((3,), torch.float32, "mean")
    assert values["model.none"] is None
    assert "model.mean.requires_grad" not in values
    assert "model.extra" not in values


def test_methods_that_run_are_reached_and_others_are_not(reached):
    names = {code.co_name for code in reached.codes}
    assert {"forward", "shift", "twice", "half", "third", "cached", "step"} <= names
    assert "other" not in names
    assert "__init__" not in names


def test_attributes_of_a_class_that_code_names_are_compared_and_restored(reached):
    assert reached.values["Scaled.factor"] == ("int", 2)
    assert "Scaled.unused" not in reached.values
    assert reached.owners["Scaled.factor"] == (Scaled, "factor")
    (assign,) = [assign for read, assign, value in reached.variables if read.args == ("factor",)]
    try:
        assign(9)
        assert Scaled.factor == 9
    finally:
        Scaled.factor = 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.register_forward_hook(lambda *_: None),
        lambda model: model.register_parameter("late", nn.Parameter(torch.zeros(1))),
        lambda model: model.add_module("late", nn.Linear(1, 1)),
        lambda model: model.register_buffer("late", torch.zeros(1)),
    ],
)
def test_numbers_of_hooks_parameters_and_modules_are_compared(model, reached, change):
    assert unchanged(reached)
    change(model)
    assert not unchanged(reached)


def test_hook_of_a_module_is_reached(model):
    def hooked(module, args, result):
        return result

    model.register_forward_hook(hooked)
    assert hooked.__code__ in reach(model, step).codes


def test_forward_of_the_module_itself_replaces_that_of_its_class(model):
    def own(x):
        return x

    model.forward = own
    assert own.__code__ in reach(model, step).codes


def test_scripted_module_is_compared_by_its_class_alone():
    script = torch.jit.script(nn.Linear(2, 2))
    values = reach(nn.Sequential(script), step).values
    assert values["model.0"][0] == "a module"
    assert not [place for place in values if place.startswith("model.0.")]


def test_method_of_tensors_that_was_exchanged_is_seen(monkeypatch):
    def uses_relu(model, batch):
        return batch.relu().sum()

    before = reach(nn.Linear(1, 1), uses_relu)
    assert unchanged(before)
    monkeypatch.setattr(torch.Tensor, "relu", lambda x: x)
    assert not unchanged(before)
