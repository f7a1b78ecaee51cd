"""Late numbers: what Python may compute with a number that is not known yet, and what needs its value."""

import math

import pytest
import torch
from panpipe.core.capture.values.capture_errors import NeedsValue
from panpipe.core.capture.values.late_numbers import (
    LateNumber,
    holds_captured,
    holds_late_numbers,
    with_late_numbers_as_tensors,
)
from panpipe.core.capture.values.text_marks import filled_in


class Watch:
    """Records values that are written into text."""

    started = False

    def __init__(self):
        self.values = []

    def late(self, value):
        self.values.append(value.double())
        return len(self.values) - 1


def late(value):
    return LateNumber(torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None), Watch())


def value(number):
    return number.tensor.item()


COMPUTED = {
    "add": lambda x: x + 2,
    "add from the left": lambda x: 2 + x,
    "subtract": lambda x: x - 2,
    "subtract from": lambda x: 2 - x,
    "multiply": lambda x: x * 3,
    "divide": lambda x: x / 2,
    "divide into": lambda x: 2 / x,
    "negative": lambda x: -x,
    "positive": lambda x: +x,
    "absolute": abs,
    "power": lambda x: x**2,
    "with a float": lambda x: 0.5 * x,
    "less": lambda x: x < 3,
    "at most": lambda x: x <= 3,
    "greater": lambda x: x > 3,
    "at least": lambda x: x >= 3,
    "equal": lambda x: x == 3,
    "other": lambda x: x != 3,
}


@pytest.mark.parametrize("start", [3, -4, 2.5, True], ids=repr)
@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_late_number_computes_what_python_computes(start, compute):
    found, wanted = compute(late(start)), compute(start)
    assert type(found) is LateNumber
    assert value(found) == wanted
    assert isinstance(found, type(wanted))


def test_late_number_with_a_tensor_gives_a_tensor_of_its_dtype():
    single = torch.tensor([1.0, 2.0])
    found = late(0.5) * single
    assert (found.tolist(), found.dtype) == ([0.5, 1.0], torch.float32)
    assert (late(2) + torch.tensor([1, 2])).tolist() == [3, 4]


@pytest.mark.parametrize(("start", "digits", "wanted"), [(2.625, 2, 2.62), (2.5, None, 2), (3.75, 0, 4.0)])
def test_late_number_is_rounded(start, digits, wanted):
    found = round(late(start)) if digits is None else round(late(start), digits)
    assert value(found) == wanted
    assert isinstance(found, int if digits is None else float)


def test_type_of_a_late_number_is_that_of_its_value():
    assert isinstance(late(1.5), float)
    assert isinstance(late(2), int)
    assert isinstance(late(True), bool)
    assert not isinstance(late(2), float)


def test_text_has_marks_that_are_filled_in_later():
    number = late(2.0)
    text = f"loss {number:.2f}, {number}"
    assert filled_in(text, number.watch.values) == "loss 2.00, 2.0"
    assert [x.item() for x in number.watch.values] == [2.0, 2.0]


NEEDS = {
    "int": int,
    "float": float,
    "index": lambda x: [0, 1, 2][x],
    "round": round,
    "bool": bool,
    "pow": lambda x: x**-1,
    "hash": hash,
    "a division with a remainder": lambda x: x // 2,
    "logic": lambda x: x & 1,
    "floor": math.floor,
    "ceil": math.ceil,
    "bit_length": lambda x: x.bit_length(),
}


@pytest.mark.parametrize("name", NEEDS)
def test_other_uses_need_the_value(name):
    with pytest.raises(NeedsValue, match=f"{name} needs the value of a tensor"):
        NEEDS[name](late(3))


def test_names_that_numbers_do_not_have_are_no_attributes():
    with pytest.raises(AttributeError, match="shape"):
        _ = late(3).shape
    number = late(3)
    assert number.item() is number


def test_comparison_with_text_is_that_of_other_objects():
    assert (late(3) == "three") is False
    with pytest.raises(TypeError):
        _ = late(3) < "three"


def test_late_numbers_in_a_nesting_are_found_and_replaced():
    number = late(3)
    nested = {"a": [1, (number,)], "b": torch.ones(1)}
    assert holds_late_numbers(nested)
    assert holds_captured(nested)
    assert not holds_late_numbers([1, 2.5, torch.ones(1)])
    assert not holds_captured([1, 2.5, torch.ones(1)])
    assert with_late_numbers_as_tensors(nested)["a"][1][0] is number.tensor


def test_fake_tensor_is_captured_and_no_late_number():
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(2)
    assert holds_captured([fake])
    assert not holds_late_numbers([fake])
