"""Fake tensors for a model's state: strides, ties, and gradients."""

import torch
from panpipe.core.capture.values.fake_tensors import fake_of, fake_state
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")


def test_fake_has_strides_and_dtype_and_is_contiguous_in_another_shape():
    mode, tensor = FakeTensorMode(), torch.zeros(2, 3, dtype=torch.float16).t()
    fake, other = fake_of(tensor, mode, CPU), fake_of(tensor, mode, CPU, (5, 3))
    assert (fake.shape, fake.stride(), fake.dtype) == (tensor.shape, (1, 3), torch.float16)
    assert (tuple(other.shape), other.stride(), other.dtype) == ((5, 3), (3, 1), torch.float16)
    assert fake_of(tensor, mode, CPU, (3, 2)).stride() == (1, 3)


def test_tied_parameters_share_one_fake_under_their_first_name():
    inner = nn.Module()
    inner.first, inner.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    inner.second.weight = inner.first.weight
    inner.first.register_buffer("mean", torch.zeros(2))
    inner.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    whole = nn.Module()
    whole.model = inner
    canonical, fakes = fake_state(whole, FakeTensorMode(), CPU, gradients=True)
    assert canonical == {
        "model.first.weight": "first.weight", "model.second.weight": "first.weight", "model.frozen": "frozen",
        "model.first.mean": "first.mean",
    }  # fmt: skip
    assert fakes["model.second.weight"] is fakes["model.first.weight"]
    assert fakes["model.first.weight"].requires_grad
    assert not fakes["model.frozen"].requires_grad
    assert not isinstance(fakes["model.first.mean"], nn.Parameter)
    _, without = fake_state(whole, FakeTensorMode(), CPU, gradients=False)
    assert not without["model.first.weight"].requires_grad
