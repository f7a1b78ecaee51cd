"""Placeholder values of fake tensors."""

import ctypes

import pytest
import torch
from panpipe.core.capture.values.placeholder_values import PlaceholderValues
from torch._subclasses.fake_tensor import FakeTensorMode


def test_address_of_a_fake_tensor_holds_zeros_in_every_run():
    found = []
    for _ in range(2):
        with FakeTensorMode(), PlaceholderValues():
            x = torch.randn(4, 8, dtype=torch.float64)
            found.append((x.data_ptr(), x[1].data_ptr()))
            assert ctypes.string_at(x.data_ptr(), x.nbytes) == bytes(x.nbytes)
    assert found[0] == found[1]
    assert found[0][1] == found[0][0] + 64


def test_address_of_a_fake_tensor_that_is_too_large_is_refused():
    with FakeTensorMode(), PlaceholderValues():
        x = torch.empty(1 << 40)
        with pytest.raises(RuntimeError, match="fake tensor of 4398046511104 bytes has no address"):
            x.data_ptr()
