"""Marks of late values in texts, and what is written in their place."""

import operator

import pytest
import torch
from panpipe.core.capture.values.capture_errors import NeedsValue
from panpipe.core.capture.values.text_marks import UnknownText, filled_in, number_mark, plain, tensor_mark
from torch import nn


@pytest.mark.parametrize(
    ("dtype", "spec", "value", "shown"),
    [
        (torch.float32, ".2f", 1.239, "1.24"),
        (torch.float64, "", 0.5, "0.5"),
        (torch.int64, "04d", 7.0, "0007"),
        (torch.int64, "", 3.0, "3"),
        (torch.bool, "", 1.0, "True"),
        (torch.bool, "", 0.0, "False"),
        (torch.float32, ">8.1e", 1234.5, " 1.2e+03"),
    ],
)
def test_numbers_are_written_in_the_type_and_format_that_they_were_asked_for(dtype, spec, value, shown):
    assert filled_in(f"<{number_mark(1, dtype, spec)}>", [9.0, value]) == f"<{shown}>"


def test_text_has_several_values_in_any_order():
    marks = [number_mark(number, torch.float32, "g") for number in range(3)]
    assert filled_in(f"{marks[2]}{marks[0]}, {marks[1]}{marks[2]}", [1.0, 2.0, 3.0]) == "31, 23"


@pytest.mark.parametrize("text", ["", "nothing late", "a NUL \0 of the user's", "\0", "\0two\0", "1f:\0"])
def test_text_without_marks_stays_as_it_is(text):
    assert filled_in(text, []) == text
    mark = number_mark(0, torch.int64, "")
    assert filled_in(f"{text}={mark}", [5.0]) == f"{text}=5"


def made(build):
    """A tensor of one element, from one that requires a gradient."""
    return build(torch.tensor([2.0], requires_grad=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.tensor([1.5], dtype=torch.float64),
        torch.tensor([[3]]),
        torch.tensor(True),
        torch.tensor(1.5, requires_grad=True),
        nn.Parameter(torch.tensor(1.5)),
        made(lambda x: x * 2),
        made(lambda x: (x * 2).mean()),
        made(lambda x: (x * 2).double()),
    ],
    ids=lambda tensor: repr(tensor).replace("\n", " "),
)
def test_tensors_are_shown_as_one_process_shows_them(tensor):
    assert filled_in(f"loss {tensor_mark(0, tensor)}!", [tensor.item()]) == f"loss {tensor!r}!"


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t == "1.5", lambda t: operator.eq("nan", t), lambda t: t != "nan", lambda t: t > "1", len, hash, list,
        {"1.5": 1}.get, lambda t: "nan" in t, lambda t: t in ("1", "2"), lambda t: t.startswith("1"),
        lambda t: t[:2], lambda t: t.lower(), lambda t: f"{t:>9}", lambda t: ("loss " + t) == "loss 1.5",
        lambda t: (t + " now").endswith("w"), lambda t: ("%s" % t) == "1.5",  # noqa: UP031 - the join is the subject
    ],
)  # fmt: skip
def test_an_unknown_text_stops_what_needs_its_characters(use):
    with pytest.raises(NeedsValue, match="of a text needs the value of a tensor"):
        use(number_mark(0, torch.float32, ".1f"))


def test_an_unknown_text_is_joined_and_written():
    text = number_mark(0, torch.float32, ".1f")
    joined = [f"{text}", str(text), "a " + text, text + " b", f"<{text}>", ", ".join([text, text])]
    assert [filled_in(plain(each), [1.5]) for each in joined] == ["1.5", "1.5", "a 1.5", "1.5 b", "<1.5>", "1.5, 1.5"]
    assert [type(each) for each in joined] == [UnknownText] * 4 + [str] * 2
    assert type(plain(text)) is str
    assert text
