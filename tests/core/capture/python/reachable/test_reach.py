"""What a step reaches: kinds of values and their places, and names that only other reached code has."""

import collections
import functools
import operator
import os
import types
from array import array

import numpy
import pytest
import torch
from panpipe.core.capture.python.reachable.reach import reach
from torch import nn

SETTINGS = types.SimpleNamespace(rate=0.5, unread=7)
TABLE = {"a": 1, "b": [2, (3,)]}
NAMES = {"x", "y"}
BYTES = bytearray(b"ab")
ARRAY = numpy.array([1.0, 2.0])
FROZEN = numpy.array([1.0])
FROZEN.flags.writeable = False
MANY = list(range(5000))
NUMBERS = array("i", [1, 2])


class Slotted:
    """Has a slot, a class attribute and a method."""

    __slots__ = ("count",)
    factor = 3

    def __init__(self):
        self.count = 4

    def scaled(self):
        return self.count * self.factor


SLOTTED = Slotted()


def helper(value, by=2):
    return value * by * TABLE["a"]


def of(step, model=None):
    return reach(model or nn.Linear(2, 2), step)


def with_read(function):
    def step(model, batch):
        return function(model(batch))

    return step


PLACES = {
    "an attribute": (lambda x: x * SETTINGS.rate, "SETTINGS.rate", 0.5),
    "an entry": (lambda x: x * TABLE["a"], "TABLE['a']", 1),
    "an element": (lambda x: x * TABLE["b"][0], "TABLE['b'][0]", 2),
    "an element of a tuple": (lambda x: x * TABLE["b"][1][0], "TABLE['b'][1][0]", 3),
    "a slot": (lambda x: x * SLOTTED.scaled(), "SLOTTED.count", 4),
    "what a called function reads": (helper, "TABLE['a']", 1),
    "a default": (helper, "a default of helper[0]", 2),
    "a partial": (functools.partial(helper, by=9), "function's arguments['by']", 9),
}


@pytest.mark.parametrize(("function", "place", "value"), PLACES.values(), ids=PLACES)
def test_numbers_have_places(function, place, value):
    assert of(with_read(function)).values[place][-1] == value


def test_attribute_that_no_reached_code_names_is_not_visited():
    assert "SETTINGS.unread" not in of(with_read(lambda x: x * SETTINGS.rate)).values
    assert "SETTINGS.unread" in of(with_read(lambda x: x * SETTINGS.unread)).values


def test_name_in_a_function_that_is_found_later_is_visited_in_the_end():
    def names(value):
        return value.unread

    found = of(with_read(lambda x: x * SETTINGS.rate * names(SETTINGS)))
    assert found.values["SETTINGS.unread"][-1] == 7


def changed(function, change):
    """Whether a probe, or a compared value, differs after a change."""
    step = with_read(function)
    before = of(step)
    undo = change()
    try:
        probed = any(probe() != known for probe, known in before.probes)
        after = of(step)
        return probed, before.values != after.values
    finally:
        undo()


def put(holder, key, value):
    def change():
        old = holder[key]
        holder[key] = value
        return lambda: holder.__setitem__(key, old)

    return change


def add_name():
    NAMES.add("z")
    return lambda: NAMES.discard("z")


CHANGES = {
    "a set": (lambda x: x * ("x" in NAMES), add_name, True),
    "bytes": (lambda x: x * BYTES[0], put(BYTES, 0, 5), True),
    "an array": (lambda x: x * ARRAY[0], put(ARRAY, 0, 5.0), True),
    "an array of numbers": (lambda x: x * NUMBERS[0], put(NUMBERS, 0, 5), True),
    "a long list": (lambda x: x * MANY[4999], put(MANY, 4999, 5), True),
    "a short list": (lambda x: x * TABLE["b"][0], put(TABLE["b"], 0, 5), False),
}


@pytest.mark.parametrize(("function", "change", "probed"), CHANGES.values(), ids=CHANGES)
def test_changes_are_seen_by_probes_and_by_values(function, change, probed):
    assert changed(function, change) == (probed, True)


def test_array_that_cannot_be_written_has_no_probe():
    found = of(with_read(lambda x: x * FROZEN[0]))
    writable = of(with_read(lambda x: x * ARRAY[0]))
    assert len(writable.probes) == len(found.probes) + 1


def test_variables_of_the_environment_are_compared(monkeypatch):
    monkeypatch.setenv("PANPIPE_TEST_RATE", "3")

    def step(model, batch):
        return model(batch).sum() * float(os.environ.get("PANPIPE_TEST_RATE"))

    found = of(step)
    assert found.values["os.environ['PANPIPE_TEST_RATE']"][-1] == "3"
    monkeypatch.setenv("PANPIPE_TEST_RATE", "4")
    assert any(probe() != known for probe, known in found.probes)
    assert not any("environ" in place for place in of(with_read(helper)).values)


def test_cached_function_is_followed_and_its_cache_is_known():
    @functools.lru_cache
    def cached():
        return TABLE["a"]

    found = of(with_read(lambda x: x * cached()))
    assert found.caches == [cached]
    assert "TABLE['a']" in found.values


def test_method_is_followed_with_its_object():
    method = SLOTTED.scaled
    found = of(with_read(lambda x: x * method()))
    assert "method.count" in found.values
    appended = collections.deque([5])
    bound = appended.append
    kept = of(with_read(lambda x: [bound(x)]))
    assert kept.values["bound"] == ("a method", "append")
    assert kept.values["bound's object[0]"][-1] == 5


def test_getter_names_the_attributes_that_it_reads():
    rate = operator.attrgetter("unread")
    assert "SETTINGS.unread" in of(with_read(lambda x: x * rate(SETTINGS))).values


def test_class_and_model_are_reached_by_name():
    class Scaled(nn.Module):
        times = 2

        def __init__(self):
            super().__init__()
            self.by, self.unused, self.layer = 3, 4, nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x) * self.by * self.times

    model = Scaled()
    found = of(lambda model, batch: model(batch).sum(), model)
    assert found.values["model.by"][-1] == 3
    assert "model.unused" not in found.values
    assert any(value[-1] == 2 for place, value in found.values.items() if place.endswith("times"))
    assert {found.names_of[id(p)] for p in model.parameters()} == {"layer.weight", "layer.bias"}
    assert [p is q for p, q in zip(found.parameters, model.parameters(), strict=True)] == [True, True]
    Scaled.times = 5
    assert any(probe() != known for probe, known in found.probes) or any(
        read() != known for read, _, known in found.variables
    )


def test_variables_around_a_function_can_be_set_again():
    number = 6

    def step(model, batch):
        return model(batch).sum() * number

    found = of(step)
    ((read, assign, held),) = [each for each in found.variables if each[2] == 6]
    assign(8)
    assert (number, read()) == (8, 8)
    assign(held)


def test_tensors_by_name_or_identity():
    model, other = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    own = model.weight

    def step(model, batch):
        return model(batch).sum() + own.sum() + other.sum()

    found = of(step, model)
    assert found.values["own"] == ("a tensor", "weight")
    assert found.values["other"] == ("a tensor", id(other))
    assert [place for place, _ in found.trained] == ["other"]


def test_dicts_with_tensors_as_keys_are_known():
    model = nn.Linear(2, 2)
    by_tensor, plain = {model.weight: 1}, {"a": 1}
    found = of(lambda model, batch: model(batch).sum() * by_tensor[model.weight] * plain["a"], model)
    assert [each is by_tensor for each in found.keyed] == [True]


def test_circle_of_objects_ends():
    node = types.SimpleNamespace(rate=1)
    node.next = node
    found = of(with_read(lambda x: x * node.next.rate))
    assert found.values["node.rate"][-1] == 1
