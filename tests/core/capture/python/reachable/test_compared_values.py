"""Keys and digests by which values are compared."""

import math

import numpy
import pytest
import torch
from panpipe.core.capture.python.reachable.compared_values import (
    digest_of_array,
    digest_of_items,
    is_leaf,
    is_number,
    items_of,
    leaf_key,
)


def test_leaves_are_compared_by_value_and_type():
    assert leaf_key(math.nan) == leaf_key(math.nan)
    assert leaf_key(1) != leaf_key(1.0)
    assert leaf_key(slice(1, 2)) == leaf_key(slice(1, 2))
    assert is_leaf(torch.float32)
    assert is_leaf(None)
    assert not is_leaf([1])


@pytest.mark.parametrize(("value", "number"), [(1, True), (1.5, True), (True, False), ("1", False), (None, False)])
def test_is_number_excludes_bools(value, number):
    assert is_number(value) is number


def test_items_of_a_dict_are_keys_and_values():
    assert list(items_of({"a": 1})) == ["a", 1]
    assert list(items_of([1, 2])) == [1, 2]


def test_digest_of_items_changes_with_a_value_and_with_an_object():
    held = [object(), 1, 2]
    assert digest_of_items(held) == digest_of_items(list(held))
    assert digest_of_items(held) != digest_of_items([held[0], 1, 3])
    assert digest_of_items(held) != digest_of_items([object(), 1, 2])


def test_digest_of_an_array_is_of_its_values_unless_it_cannot_be_written():
    values = numpy.arange(6.0).reshape(2, 3)
    assert digest_of_array(values) == digest_of_array(values.copy())
    assert digest_of_array(values.T) == digest_of_array(values.T.copy())
    changed = values.copy()
    changed[0, 0] = 7
    assert digest_of_array(values) != digest_of_array(changed)
    values.flags.writeable = False
    assert digest_of_array(values) == id(values)
    assert digest_of_array(bytearray(b"ab")) == digest_of_array(bytearray(b"ab"))
