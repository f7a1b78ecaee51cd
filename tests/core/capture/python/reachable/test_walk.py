"""What a walk visits of an object's attributes, and where classes come from."""

import collections
import io
import sys
import types

import numpy
import pytest
import torch
from panpipe.core.capture.python.reachable.used_names import UsedNames
from panpipe.core.capture.python.reachable.walk import Walk, is_users_function, origin_of_class
from panpipe.core.capture.values.code_origin import Origin


class Recorded(Walk):
    """Records what it is asked to visit."""

    def __init__(self, *names, any_name=False):
        super().__init__(UsedNames(frozenset(names), frozenset(), any_name))
        self.visited = []

    def visit(self, place, value, depth, owner=None):
        self.visited.append((place, value, depth, owner))


class Own:
    pass


def test_attributes_that_code_names_are_visited_with_their_owner():
    walk, own = Recorded("scale", "training"), {"scale": 2, "unused": 3, "training": True}
    walk.visit_attributes("model", own, 4)
    assert walk.visited == [("model.scale", 2, 5, (own, "scale"))]
    assert walk.entries == [(own, "scale", 2)]
    assert walk.places == ["model.scale"]
    assert walk.sizes == [(own, 3)]


def test_computed_names_may_be_those_of_any_data():
    walk, own = Recorded(any_name=True), {"n": 1, "held": [1], "mine": Own(), "file": sys.stdout, "f": len}
    walk.visit_attributes("x", own, 0)
    assert [place for place, *_ in walk.visited] == ["x.n", "x.held", "x.mine"]


def test_others_are_read_where_they_hold_plain_values_or_the_users_functions():
    def mine():
        pass

    names = ["n", "path", "deep", "large", "f", "theirs", "unused"]
    own = {
        "n": 1, "path": ["a", "b"], "deep": [[1]], "large": list(range(257)), "f": mine,
        "theirs": collections.namedtuple, "unused_too": 1,
    }  # fmt: skip
    walk = Recorded(*names)
    walk.visit_others("library", own, 0)
    assert {place for place, *_ in walk.visited} == {"library.n", "library.path", "library.f"}
    assert walk.values == {"library.theirs": ("a function", collections.namedtuple)}
    assert set(walk.places) == {"library.n", "library.path", "library.f", "library.theirs"}


@pytest.mark.parametrize(
    ("kind", "origin"),
    [
        (Own, Origin.USER), (dict, Origin.INTERNAL), (io.TextIOWrapper, Origin.INTERNAL),
        (torch.nn.Linear, Origin.LAYERS), (numpy.ndarray, Origin.LIBRARY),
        (type("Made", (), {"__module__": "a module that is not there"}), Origin.USER),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_origin_of_a_class_is_that_of_its_file(kind, origin):
    assert origin_of_class(kind) is origin


def test_class_that_is_typed_in_is_the_users(monkeypatch):
    for name, origin in (("__main__", Origin.USER), ("embedded", Origin.INTERNAL)):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # without a file
        assert origin_of_class(type("Typed", (), {"__module__": name})) is origin


def test_functions_of_the_users_own_code():
    assert is_users_function(test_functions_of_the_users_own_code)
    assert not is_users_function(types.SimpleNamespace)
    assert not is_users_function(len)
    assert not is_users_function(collections.namedtuple)
