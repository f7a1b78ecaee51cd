"""Messages in batches through a slot of bounded size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from panpipe.backends.message_slot import MessageSlot, Piece, batches, load, unload


def test_small_message_is_one_batch_of_aligned_pieces():
    assert list(batches([5, 0, 20], most=64)) == [[Piece(0, 0, 5, 0), Piece(2, 0, 20, 16)]]
    assert list(batches([])) == []


def test_large_tensor_is_divided_over_batches():
    assert list(batches([40], most=16)) == [[Piece(0, 0, 16, 0)], [Piece(0, 16, 32, 0)], [Piece(0, 32, 40, 0)]]


@given(sizes=st.lists(st.integers(0, 100), max_size=6), most=st.sampled_from([16, 32, 48]))
def test_every_byte_arrives_through_a_slot_of_any_size(sizes, most):
    sent = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    received = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    ours, theirs = MessageSlot(torch.device("cpu")), MessageSlot(torch.device("cpu"))
    for batch in batches(sizes, most):
        assert batch[-1].end <= most
        load(ours.of(batch[-1].end), sent, batch)
        theirs.of(batch[-1].end).copy_(ours.of(batch[-1].end))
        unload(theirs.of(batch[-1].end), received, batch)
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


@pytest.mark.parametrize(("first", "second", "kept"), [(16, 8, True), (8, 16, False)])
def test_slot_keeps_its_memory_unless_it_must_grow(first, second, kept):
    slot = MessageSlot(torch.device("cpu"))
    before = slot.of(first).data_ptr()
    assert slot.of(second).numel() == second
    assert (slot.of(second).data_ptr() == before) is kept
