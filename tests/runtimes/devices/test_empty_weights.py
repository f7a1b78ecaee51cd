"""Models without memory for their parameters: buffers are real, ties stay ties, and other threads are not affected."""

import threading

import torch
from panpipe.runtimes.devices.empty_weights import empty_weights
from torch import nn


def test_parameters_are_on_meta_and_buffers_are_real():
    with empty_weights():
        model = nn.BatchNorm1d(3)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.running_var.tolist() == [1, 1, 1]
    assert not nn.Linear(1, 1).weight.is_meta  # after the context


def test_tied_weight_stays_one_parameter():
    with empty_weights():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        weight = nn.Parameter(torch.ones(3, 3))
        model[0].weight = weight
        model[1].weight = weight
    assert model[0].weight is model[1].weight
    assert len(dict(model.named_parameters())) == 3


def test_frozen_parameters_and_their_attributes_are_kept():
    with empty_weights():
        module = nn.Module()
        parameter = nn.Parameter(torch.ones(2), requires_grad=False)
        parameter.tag = "frozen"
        module.weight = parameter
        module.none = None
        module.register_parameter("absent", None)
    assert (module.weight.is_meta, module.weight.requires_grad, module.weight.tag) == (True, False, "frozen")
    assert module.absent is None


def test_lazy_parameters_are_left_to_their_first_call():
    with empty_weights():
        lazy = nn.LazyLinear(2)
    assert isinstance(lazy.weight, nn.parameter.UninitializedParameter)


def test_modules_of_other_threads_have_memory():
    found = []
    with empty_weights():
        thread = threading.Thread(target=lambda: found.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
    assert not found[0].weight.is_meta


def test_context_ends_after_an_error():
    try:
        with empty_weights():
            raise ValueError
    except ValueError:
        pass
    assert not nn.Linear(1, 1).weight.is_meta
