"""Fingerprints of tensors: equal bits are equal, and everything else is not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.runtimes.batch.fingerprint import BITS, fingerprint


def of(*parts):
    return int(fingerprint(parts))


@pytest.mark.parametrize("count", [1, 3, 1000, (1 << 15) + 1, 1_200_000])
def test_fingerprint_of_parts_equals_that_of_the_joined_tensor(count):
    whole = torch.arange(count, dtype=torch.int32)
    assert of(whole) == of(*whole.tensor_split(7)) == of(whole.clone()) == of(torch.stack([whole, whole], 1)[:, 0])
    assert count < 7 or of(*reversed(whole.tensor_split(7))) != of(whole)
    assert 0 <= of(whole) < 1 << BITS
    changed = whole.clone()
    changed[-1] += 1
    assert of(changed) != of(whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_fingerprint_depends_on_the_order_of_rows(dtype):
    labels = torch.tensor([1, -1] * 16 + [1, 1, -1, -1]).to(dtype)  # of two that differ in the sign alone
    assert of(labels) != of(labels.flip(0))
    swapped = labels.clone()
    swapped[[0, 1]] = labels[[1, 0]]
    assert of(labels) != of(swapped)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40), st.data())
def test_fingerprint_changes_with_every_bit(values, data):
    tensor = torch.tensor(values)
    place, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 62))
    changed = tensor.clone()
    changed[place] ^= 1 << bit
    assert of(tensor) != of(changed)


@pytest.mark.parametrize("tensor", [
    torch.tensor(True), torch.zeros(0), torch.ones(7, dtype=torch.uint8)[1:], torch.eye(3).to_sparse(),
    torch.randn(3, dtype=torch.complex64).conj(), torch.ones(5, device="meta"),
    torch.tensor(float("nan")),
])  # fmt: skip
def test_fingerprint_is_defined_for_any_tensor(tensor):
    assert of(tensor) == of(tensor)
