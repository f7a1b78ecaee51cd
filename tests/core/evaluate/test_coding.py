"""Actions as integers: codes, capacity for split backwards, and the way back."""

import numpy as np
import pytest
from panpipe.core.evaluate.coding import decode_orders, encode

from ...support.plans import orders

ROWS = orders("0F0 0F1 0B0 0I1 0W1", "1F1")


def test_codes_have_stage_microbatch_and_kind():
    coded, lengths = encode(ROWS, 2, 3)
    assert coded[0, :5].tolist() == [0, 4, 3, 5, 6]
    assert coded[1, 0] == 4 * (1 * 3 + 1)
    assert lengths.tolist() == [5, 1]


def test_rows_have_capacity_for_all_backwards_of_their_stages_to_be_split():
    assert encode(ROWS, 2, 3)[0].shape == (2, 9)
    assert encode(orders("0F0 1F0", ""), 2, 3)[0].shape == (2, 18)
    assert encode(orders(""), 0, 3)[0].shape == (1, 0)


@pytest.mark.parametrize(("split", "first"), [((), "0F0 0F1 0B0 0I1 0W1"), ((0,), "0F0 0F1 0I0 0W0 0I1 0W1")])
def test_whole_backwards_of_split_stages_become_their_halves(split, first):
    found = decode_orders(*encode(ROWS, 2, 3, split=split), 2, 3)
    assert " ".join(map(str, found[0])) == first
    assert found[1] == ROWS[1]


def test_actions_of_one_size_are_the_same_objects():
    coded, lengths = encode(ROWS, 2, 3)
    first, second = (decode_orders(coded, lengths, 2, 3)[0][0] for _ in range(2))
    assert first is second
    assert decode_orders(np.zeros((1, 4), dtype=np.int64), np.array([0]), 1, 1) == ((),)
