"""Nestings taken apart and filled again, and how two differ."""

import pytest
import torch
from panpipe.core.capture.values.nesting import extract_tensors, numbers_as_tensors, tensors_of

A, B = torch.tensor([1.0]), torch.tensor([2.0, 3.0])
VALUE = {"a": A, "rest": [1, (B, "text", None)]}


def test_nesting_is_filled_with_other_tensors_in_order():
    tensors, nesting = extract_tensors(VALUE)
    assert [tensor is other for tensor, other in zip(tensors, (A, B), strict=True)] == [True, True]
    found = nesting.filled([B, A, A])  # there may be more
    assert found["a"] is B
    assert found["rest"] == [1, (A, "text", None)]
    assert [tensor is other for tensor, other in zip(tensors_of(VALUE), (A, B), strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (VALUE, None),
        ({"a": B, "rest": [1, (A, "text", None)]}, None),  # tensors are no constants
        ({"a": A, "rest": [2, (B, "text", None)]}, "2 and not 1"),
        ({"a": A, "rest": [True, (B, "text", None)]}, "True and not 1"),
        ({"a": A, "rest": [1, (B, "words", None)]}, "'words' and not 'text'"),
        ({"a": A, "rest": [1, [B, "text", None]]}, "another structure"),
        ({"b": A, "rest": [1, (B, "text", None)]}, "another structure"),
    ],
)
def test_constants_and_structure_are_compared(other, said):
    assert extract_tensors(VALUE)[1].difference(extract_tensors(other)[1]) == said


def test_number_that_is_not_one_equals_itself_alone():
    nan, zero = (extract_tensors([float(text)])[1] for text in ("nan", "-0.0"))
    assert nan.difference(extract_tensors([float("nan")])[1]) is None
    assert zero.difference(extract_tensors([0.0])[1]) == "0.0 and not -0.0"


def test_numbers_become_tensors_of_float64():
    found = numbers_as_tensors({"loss": A, "n": [3, True, "x"]})
    assert found["loss"] is A
    assert [(value.item(), value.dtype) for value in found["n"][:2]] == [(3.0, torch.float64), (1.0, torch.float64)]
    assert found["n"][2] == "x"
