"""Which values of a program are compared before each step, and at which cost."""

import dataclasses
import types

import pytest
import torch
from panpipe.core.capture.python.guards import Guards
from torch import nn

from ....support.registry import Registry

changing, ignored = Registry(), Registry()
RATE, TABLE, loss = 1.0, {"kl": 1.0, "names": ["a"]}, 0.0


class Layer(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.k0, self.config = nn.Linear(2, 2), 1.0, types.SimpleNamespace(deep=types.SimpleNamespace(x=1))
        self.drop, self.history = nn.Dropout(0.5), []

    @property
    def half(self):
        return self.whole / 2

    whole = 2.0

    def forward(self, x):
        config = self.config
        self.history.append(1.0)
        return self.drop(self.linear(x)) * getattr(self, f"k{0}") * config.deep.x * self.half * self.scale


def step(model, batch):
    out = types.SimpleNamespace(loss=model(batch).sum())
    return out.loss * RATE * TABLE["kl"]


def assigned(owner, name, value):
    return lambda: setattr(owner, name, value)


@changing
def attribute_of_a_config_of_a_module(model):
    return assigned(model.config.deep, "x", 2)


@changing
def type_of_a_number(model):
    return assigned(model.config.deep, "x", True)


@changing
def attribute_by_a_computed_name(model):
    return assigned(model, "k0", 2.0)


@changing
def attribute_that_hides_that_of_a_class(model):
    return assigned(model, "scale", 2.0)


@changing
def what_a_property_reads(model):
    return assigned(model, "whole", 3.0)


@changing
def mode_of_a_layer(model):
    return model.drop.eval


@changing
def frozen_parameter(model):
    return lambda: model.linear.requires_grad_(False)


@changing
def dtype_of_the_model(model):
    return lambda: model.half_precision() if hasattr(model, "half_precision") else nn.Module.double(model)


@changing
def replaced_module(model):
    return assigned(model, "linear", nn.Linear(2, 2))


@changing
def hook(model):
    return lambda: model.linear.register_forward_hook(lambda *_: None)


@changing
def item_of_a_dict_of_the_module(model):
    return lambda: TABLE.update(kl=2.0)


@changing
def item_of_a_list_in_a_dict(model):
    return lambda: TABLE["names"].append("b")


@changing
def setting_of_torch(model):
    return lambda: torch.set_default_dtype(torch.float64)


@ignored
def global_named_as_an_attribute_of_the_result(model):
    return lambda: globals().__setitem__("loss", 1.0)


@ignored
def list_to_which_the_step_only_appends(model):
    return lambda: model.history.append(2.0)


@ignored
def equal_number(model):
    return assigned(model, "k0", float("1.0"))


@ignored
def attribute_that_no_code_names(model):
    return assigned(model, "other", 1.0)


@pytest.fixture(autouse=True)
def put_back():
    yield
    torch.set_default_dtype(torch.float32)
    TABLE.update(kl=1.0, names=["a"])


@pytest.mark.parametrize("name", changing)
def test_change_is_noticed_and_named(name):
    model = Layer()
    change = changing[name](model)
    before = Guards(model, step)
    assert before.unchanged()
    assert Guards(model, step).key == before.key
    change()
    assert not before.unchanged()
    assert list(Guards(model, step).others(before))


@pytest.mark.parametrize("name", ignored)
def test_what_the_step_does_not_read_changes_nothing(name):
    model = Layer()
    change = ignored[name](model)
    before = Guards(model, step)
    change()
    assert before.unchanged() or Guards(model, step).key == before.key


def test_object_of_the_step_is_read_by_the_attributes_of_its_code():
    @dataclasses.dataclass
    class Trainer:
        beta: float = 1.0
        loss: float = 0.0

        def step(self, model, batch):
            return model(batch).loss * self.beta

    trainer = Trainer()
    guards = Guards(Layer(), trainer.step)
    trainer.loss = 2.0  # as after loss = pipe.step(batch)
    assert guards.unchanged()
    trainer.beta = 2.0
    assert not guards.unchanged()


def test_variables_of_enclosing_functions_and_defaults_are_read():
    beta, calls = 1.0, 0

    def inner(x, power=1):
        return x**power * beta

    def outer(model, batch):
        nonlocal calls
        calls += 1
        return inner(model(batch)).sum()

    guards = Guards(Layer(), outer)
    calls = 5
    assert guards.unchanged()
    beta = 2.0
    assert not guards.unchanged()
    guards = Guards(Layer(), outer)
    inner.__defaults__ = (2,)
    assert not guards.unchanged()
    assert "test_guards.py:" in guards.line("beta")
