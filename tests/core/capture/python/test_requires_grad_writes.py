"""Parameters that a step freezes and unfreezes: no gradient while they are frozen, and the same settings at its end."""

import pytest
import torch
from panpipe.core.capture.python.requires_grad_writes import Toggles
from panpipe.core.errors import RequestError
from torch import nn


@pytest.fixture
def model():
    torch.manual_seed(0)
    with torch.enable_grad():
        yield nn.Linear(2, 1)


def test_operators_that_run_while_a_parameter_is_frozen_give_it_no_gradient(model):
    x = torch.ones(1, 2)
    with Toggles(model) as toggles:
        model.weight.requires_grad_(False)
        assert not model.weight.requires_grad
        frozen = torch.nn.functional.linear(x, model.weight, model.bias)
        model.weight.requires_grad = True
        assert model.weight.requires_grad
        trained = torch.nn.functional.linear(3 * x, model.weight, model.bias)
        toggles.refuse_unequal_ends()
    (frozen + trained).sum().backward()
    assert model.weight.grad.tolist() == [[3, 3]]  # of the second operator alone
    assert model.bias.grad.tolist() == [2]


def test_parameter_that_was_frozen_from_the_start_stays_so(model):
    model.weight.requires_grad_(False)
    with Toggles(model) as toggles:
        model.weight.requires_grad_(False)
        model(torch.ones(1, 2)).sum().backward()
        toggles.refuse_unequal_ends()
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("first", "words"), [(True, "frozen, and it began trained"), (False, "trained, and it began frozen")]
)
def test_step_that_ends_with_other_settings_is_refused_with_its_line(model, first, words):
    model.weight.requires_grad_(first)
    with Toggles(model) as toggles:
        model.weight.requires_grad = not first
        with pytest.raises(RequestError, match=rf"test_toggles.py:\d+: the step leaves parameter 'weight' {words}"):
            toggles.refuse_unequal_ends()


def read(weight):
    return weight.grad


def clear(weight):
    weight.grad = None


@pytest.mark.parametrize("use", [read, clear])
def test_gradients_within_a_step_are_refused(model, use):
    with Toggles(model), pytest.raises(RequestError, match="the step reads or sets the gradient of parameter 'weight'"):
        use(model.weight)


def test_other_tensors_are_left_alone(model):
    other = torch.ones(2)
    with Toggles(model):
        other.requires_grad_(True)
        assert other.requires_grad
        assert other.grad is None


def test_settings_are_given_by_keyword_or_by_default(model):
    with Toggles(model) as toggles:
        model.weight.requires_grad_(requires_grad=False)
        assert not model.weight.requires_grad
        model.weight.requires_grad_()
        assert model.weight.requires_grad
        toggles.refuse_unequal_ends()


def test_operators_on_a_frozen_parameter_compute(model):
    with Toggles(model):
        model.weight.requires_grad_(False)
        doubled = model.weight * 2
        model.weight.requires_grad_(True)
    assert torch.equal(doubled, 2 * model.weight.detach())
    assert not doubled.requires_grad
