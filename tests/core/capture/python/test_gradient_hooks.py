"""Hooks on gradients: those that only read are warned about, those that may change a gradient are refused."""

import functools
import warnings

import pytest
from panpipe.core.capture.python.refusals import check_gradient_hooks
from panpipe.core.errors import RequestError
from torch import nn

SEEN = []


def reads(gradient):
    SEEN.append(gradient)


def halves(gradient):
    return gradient / 2


class Reader:
    def __call__(self, gradient):
        SEEN.append(gradient)


def hooked(hook, after=False):
    model = nn.Linear(2, 1)
    (model.weight.register_post_accumulate_grad_hook if after else model.weight.register_hook)(hook)
    return model


@pytest.mark.parametrize("hook", [reads, Reader(), functools.partial(reads), lambda gradient: None])
def test_hook_that_only_reads_is_warned_about(hook):
    with pytest.warns(UserWarning, match="parameter 'weight' has a hook on its gradient, one of 1: a pipeline"):
        check_gradient_hooks(hooked(hook))


@pytest.mark.parametrize("hook", [halves, functools.partial(halves), lambda gradient: 2 * gradient])
def test_hook_that_returns_a_gradient_is_refused_with_its_line(hook):
    with pytest.raises(RequestError, match=r"test_gradient_hooks.py:\d+: parameter 'weight' has this hook"):
        check_gradient_hooks(hooked(hook))


def test_hook_after_accumulation_is_refused_whatever_it_returns():
    with pytest.raises(RequestError, match="may change it"):
        check_gradient_hooks(hooked(reads, after=True))


def test_hooks_of_modules_count_too():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_full_backward_hook(lambda module, inputs, outputs: inputs)
    with pytest.raises(RequestError, match="module '0' has this hook on its gradient"):
        check_gradient_hooks(model)


def test_model_without_hooks_is_accepted_silently():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_gradient_hooks(nn.Linear(2, 1))
