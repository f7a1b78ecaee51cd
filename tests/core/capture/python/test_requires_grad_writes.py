"""Parameters that a step freezes and unfreezes: no gradient while they are frozen, and the settings of its end."""

import pytest
import torch
from panpipe.core.capture.python.requires_grad_writes import EndsOtherwise, RequiresGradWrites, begin_as_it_ends
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


@pytest.mark.parametrize("first", [True, False])
def test_step_that_sets_what_it_uses_begins_with_the_settings_of_its_end(model, first):
    model.weight.requires_grad_(first)
    with RequiresGradWrites(model, settings(model)) as writes:
        model.weight.requires_grad = not first
        model(torch.ones(1, 2))
        with pytest.raises(EndsOtherwise) as raised:
            writes.check_ends()
    assert raised.value.settings == {"weight": not first}
    assert ("test_requires_grad_writes.py" in raised.value.line) is first  # the line that froze it


def test_parameter_that_is_frozen_at_the_end_may_be_used_before(model):
    with RequiresGradWrites(model, settings(model)) as writes:
        model(torch.ones(1, 2))
        model.weight.requires_grad = False
        with pytest.raises(EndsOtherwise):
            writes.check_ends()


def use(weight):
    return weight * 2


def branch(weight):
    return weight.requires_grad


@pytest.mark.parametrize(
    ("first", "early", "words"),
    [
        (False, use, "trained, and it began frozen"),
        (False, branch, "trained, and it began frozen"),
        (True, branch, "frozen, and it began trained"),
    ],
)
def test_step_that_depends_on_the_settings_of_its_start_is_refused_with_its_line(model, first, early, words):
    model.weight.requires_grad_(first)
    with RequiresGradWrites(model, settings(model)) as writes:
        early(model.weight)
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


def test_settings_of_the_end_are_set_and_frozen_parameters_are_named(model):
    with pytest.warns(UserWarning, match=r"train.py:3: the step leaves parameter 'weight' frozen: as in PyTorch"):
        begin_as_it_ends(model, EndsOtherwise({"weight": False}, "train.py:3"))
    assert settings(model) == {"weight": False, "bias": True}


def test_parameters_that_are_trained_at_the_end_are_no_warning(model, recwarn):
    model.requires_grad_(False)
    begin_as_it_ends(model, EndsOtherwise({"weight": True}, ""))
    assert settings(model) == {"weight": True, "bias": False}
    assert not recwarn.list


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
