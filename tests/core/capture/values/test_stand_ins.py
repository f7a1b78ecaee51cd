"""Numbers in place of values that are not there."""

import pytest
import torch
from panpipe.core.capture.values.fake_tensors import stand_in_for


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.empty(3, 4, device="meta"), (4, 1)),
        (torch.empty(4, 3, device="meta").T, (1, 3)),
        (torch.empty(2, 3, 4, 5, device="meta").to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(1, 4, device="meta").expand(3, 4), (4, 1)),
        (torch.empty(3, 8, device="meta")[:, ::2], (4, 1)),
    ],
)
def test_stand_in_has_the_strides_of_a_dense_tensor(tensor, strides):
    made = stand_in_for(tensor)
    assert made.shape == tensor.shape
    assert made.stride() == strides
    assert made.device.type == "cpu"
    assert 0 < made.std() < 0.1


def test_stand_in_has_the_dtype_and_zeros_for_integers():
    made = stand_in_for(torch.empty(3, dtype=torch.int32, device="meta"))
    assert made.dtype is torch.int32
    assert made.tolist() == [0, 0, 0]


def test_stand_ins_are_deterministic_and_use_no_generator_of_the_user():
    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    large = torch.empty((1 << 20) + 7, device="meta")
    made = stand_in_for(large)
    assert torch.equal(made[:7], made[-7:])
    assert torch.equal(made, stand_in_for(large))
    assert torch.equal(torch.rand(1), first)
