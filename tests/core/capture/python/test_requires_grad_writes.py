"""Parameters that a step freezes and unfreezes: no gradient while they are frozen, and the settings of its end."""

import pytest
import torch
from panpipe.core.capture.python.requires_grad_writes import RequiresGradWrites
from panpipe.core.errors import RequestError
from torch import nn


@pytest.fixture
def model():
    torch.manual_seed(0)
    with torch.enable_grad():
        yield nn.Linear(2, 1)


def settings(model):
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def test_operators_that_run_while_a_parameter_is_frozen_give_it_no_gradient(model):
    x = torch.ones(1, 2)
    with RequiresGradWrites(model, settings(model)) as writes:
        model.weight.requires_grad_(False)
        assert not model.weight.requires_grad
        frozen = torch.nn.functional.linear(x, model.weight, model.bias)
        model.weight.requires_grad = True
        assert model.weight.requires_grad
        trained = torch.nn.functional.linear(3 * x, model.weight, model.bias)
        writes.check_ends()
    (frozen + trained).sum().backward()
    assert model.weight.grad.tolist() == [[3, 3]]  # of the second operator alone
    assert model.bias.grad.tolist() == [2]


def test_parameter_that_was_frozen_from_the_start_stays_so(model):
    model.weight.requires_grad_(False)
    with RequiresGradWrites(model, settings(model)) as writes:
        model.weight.requires_grad_(False)
        model(torch.ones(1, 2)).sum().backward()
        writes.check_ends()
    assert model.weight.grad is None


@pytest.mark.parametrize(("first", "words"), [(False, "trained, and it began frozen"), (True, "frozen, and it began")])
def test_step_that_ends_with_other_settings_is_refused_with_its_line(model, first, words):
    model.weight.requires_grad_(first)
    with RequiresGradWrites(model, settings(model)) as writes:
        model.weight.requires_grad = not first
        with pytest.raises(
            RequestError, match=rf"test_requires_grad_writes.py:\d+: the step leaves parameter 'weight' {words}"
        ):
            writes.check_ends()


def test_captured_tensors_without_gradients_have_the_settings_of_the_users_parameters(model):
    given = settings(model)
    model.requires_grad_(False)  # as for an evaluation
    with RequiresGradWrites(model, given) as writes:
        assert model.weight.requires_grad
        model.weight.requires_grad_(False)
        assert not model.weight.requires_grad
        model.weight.requires_grad_(True)
        writes.check_ends()
    assert not model.weight.requires_grad


def read(weight):
    return weight.grad


def clear(weight):
    weight.grad = None


@pytest.mark.parametrize("access", [read, clear])
def test_gradients_within_a_step_are_refused(model, access):
    with (
        RequiresGradWrites(model, settings(model)),
        pytest.raises(RequestError, match="the step reads or sets the gradient of parameter 'weight'"),
    ):
        access(model.weight)


def test_other_tensors_are_left_alone(model):
    other = torch.ones(2)
    with RequiresGradWrites(model, settings(model)):
        other.requires_grad_(True)
        assert other.requires_grad
        assert other.grad is None


def test_settings_are_given_by_keyword_or_by_default(model):
    with RequiresGradWrites(model, settings(model)) as writes:
        model.weight.requires_grad_(requires_grad=False)
        assert not model.weight.requires_grad
        model.weight.requires_grad_()
        assert model.weight.requires_grad
        writes.check_ends()


def test_operators_on_a_frozen_parameter_compute(model):
    with RequiresGradWrites(model, settings(model)):
        model.weight.requires_grad_(False)
        doubled = model.weight * 2
        model.weight.requires_grad_(True)
    assert torch.equal(doubled, 2 * model.weight.detach())
    assert not doubled.requires_grad
