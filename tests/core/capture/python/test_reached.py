"""What a step reaches: places, lines of the user's, numbers that can be set again, open files."""

import io
import math
import types
from collections import deque

import pytest
import torch
from panpipe.core.capture.python.reachable.reach import reach
from panpipe.core.capture.python.reached import Reached
from torch import nn

HELD = {"rate": 0.5, "list": [1, 2], "deque": deque([3])}


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 4


SLOTTED = Slotted()


def counted():
    number = 6

    def step(model, batch):
        return model(batch).sum() * number * HELD["rate"] * SLOTTED.count * HELD["list"][0] * HELD["deque"][0]

    return step


@pytest.fixture
def step():
    return counted()


@pytest.fixture
def reached(step):
    return reach(nn.Linear(2, 2), step)


PLACES = {
    "a dict": ("HELD['rate']", 0.5),
    "a list": ("HELD['list'][1]", 2),
    "a deque": ("HELD['deque'][0]", 3),
    "a slot": ("SLOTTED.count", 4),
    "a variable around": ("number", 6),
}


@pytest.mark.parametrize(("place", "number"), PLACES.values(), ids=PLACES)
def test_numbers_are_read_and_set_where_they_are(reached, place, number):
    assert reached.number(place) == number
    reached.assign(place, 9)
    try:
        assert reached.number(place) == 9
    finally:
        reached.assign(place, number)
    assert reached.number(place) == number


def test_number_that_is_gone_or_no_number_is_nan():
    found, held = Reached(), {"a": 1, "flag": True, "text": "x"}
    found.owners = {
        "gone": (held, "b"), "flag": (held, "flag"), "text": (held, "text"), "attribute": (object(), "x"),
        "list": ([1], 3), "cell": (types.CellType(), "x"), "there": (held, "a"),
    }  # fmt: skip
    for place in ("gone", "flag", "text", "attribute", "list", "cell"):
        assert math.isnan(found.number(place)), place
    assert found.number("there") == 1


def test_line_of_a_place_is_the_users_line_that_names_it(reached, step):
    line = step.__code__.co_firstlineno
    assert reached.line_of("HELD['rate']") == f"{__file__}:{line + 1}"
    assert reached.line_of("SLOTTED.count") == f"{__file__}:{line + 1}"
    assert reached.line_of("nothing.of_that_name") == f"{__file__}:{line}"
    assert Reached().line_of("x") == "the step"


def test_tensors_outside_of_the_model_that_require_a_gradient_are_noted():
    found, own, other = Reached(), nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)
    found.names_of = {id(own): "weight"}
    for place, tensor in (("own", own), ("other", other), ("plain", torch.ones(1)), ("made", other * 1)):
        found.note_trained(place, tensor)
    assert [(place, tensor is other) for place, tensor in found.trained] == [("other", True)]
    assert found.identity(own) == "weight"
    assert found.identity(other) == id(other)


def test_place_of_a_tensor_is_that_of_the_memory_it_shares():
    table = torch.arange(4.0)

    def step(model, batch):
        return model(batch).sum() + table.sum()

    found = reach(nn.Linear(2, 2), step)
    assert found.place_of(table[1:]) == "table"
    assert found.place_of(torch.ones(1)) == ""


def test_files_open_for_writing_are_found_with_their_places(tmp_path):
    log, memory, source = (tmp_path / "log").open("w"), io.StringIO(), tmp_path / "source"
    source.write_text("x")
    read = source.open()

    def step(model, batch):
        log.write("x")
        memory.write(read.read())
        return model(batch).sum()

    with log, read:
        assert [(place, file is log) for place, file in reach(nn.Linear(2, 2), step).files()] == [("log", True)]
    assert not list(reach(nn.Linear(2, 2), step).files())  # closed


def test_entries_and_lists_have_their_places(reached):
    assert {place for place, (_, key, _) in reached.named_entries() if key == "rate"} == {"HELD['rate']"}
    named = {place: items for place, (_, items) in reached.named_sequences()}
    assert named["HELD['list']"] == [1, 2]
