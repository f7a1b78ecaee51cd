"""States of other packages, and in C: read by calls without arguments, in their containers, by their lengths."""

import functools
import hashlib
import os
import sys
import warnings
from collections import OrderedDict

import numpy
import pytest
import torch
from panpipe.core.capture.python.reachable.getters import getters_called, result_of
from panpipe.core.capture.python.reads import Reads
from torch import nn
from torch.utils.data import Subset

from .....support.programs.noticed import assert_noticed
from .....support.registry import Registry

cases = Registry()
"""Each returns a function that reads a number, and one that sets it."""


class Base:
    """A class with subclasses."""


@pytest.fixture(autouse=True)
def settings_put_back(monkeypatch):
    limit, filters = sys.getrecursionlimit(), list(warnings.filters)
    monkeypatch.setattr(sys, "argv", ["train.py", "1"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with torch.random.fork_rng():
        yield
    sys.setrecursionlimit(limit)
    warnings.filters[:] = filters
    torch.set_anomaly_enabled(False)


@cases
def recursion_limit():
    sys.setrecursionlimit(1000)
    return lambda: sys.getrecursionlimit() / 1000, lambda number: sys.setrecursionlimit(int(1000 * number))


@cases
def seed_of_torch():
    torch.manual_seed(1)
    return lambda: float(torch.initial_seed()), lambda number: torch.manual_seed(int(number))


@cases
def state_of_numpy():
    numpy.random.seed(1)
    return lambda: float(numpy.random.get_state()[1][0]), lambda number: numpy.random.seed(int(number))


@cases
def anomaly_mode():
    return lambda: 1.0 + torch.is_anomaly_enabled(), lambda _: torch.set_anomaly_enabled(True)


@cases
def subclasses():
    held = []
    first = len(Base.__subclasses__())
    return lambda: 1.0 + len(Base.__subclasses__()) - first, lambda _: held.append(type("Later", (Base,), {}))


@cases
def working_folder():
    first = os.getcwd()
    return lambda: 1.0 + (os.getcwd() != first), lambda _: os.chdir(os.sep)


@cases
def arguments_of_the_script():
    return lambda: float(sys.argv[1]), lambda number: sys.argv.__setitem__(1, str(number))


@cases
def path_of_modules():
    first = len(sys.path)
    return lambda: 1.0 + len(sys.path) - first, lambda _: sys.path.append("elsewhere")


@cases
def length_of_a_subset():
    subset = Subset(range(10), [0])
    return lambda: float(len(subset)), lambda _: subset.indices.append(1)


@cases
def function_that_dispatches():
    @functools.singledispatch
    def weight(_):
        return 1.0

    return lambda: weight("text"), lambda number: weight.register(str)(lambda _: number)


@cases
def order_of_a_dict():
    held = {"first": 1.0, "last": 2.0}
    return lambda: next(iter(held.values())), lambda _: held.__setitem__("first", held.pop("first"))


@cases
def order_of_an_ordered_dict():
    held = OrderedDict(first=1.0, last=2.0)
    return lambda: next(iter(held.values())), lambda _: held.move_to_end("first")


@cases
def tuple_of_tensors_around_the_step():
    held = torch.ones(2), torch.ones(2)

    def assign(number):
        nonlocal held
        held = torch.full((2,), number), torch.ones(2)

    return lambda: 1.0 * held[0][0].item(), assign


@cases
def digest_of_a_hash():
    held = hashlib.blake2b(b"1")
    first = held.digest()
    return lambda: 1.0 + (held.digest() != first), lambda _: held.update(b"2")


@pytest.mark.parametrize("make", cases.values(), ids=list(cases))
def test_change_of_a_state_elsewhere_is_noticed(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_noticed(*make())


def test_weights_of_another_module_are_compared_by_identity():
    held = {"target": nn.Linear(2, 2)}
    model = nn.Linear(2, 2)

    def step(m, b):
        return (m(b) - held["target"](b)).square().sum()

    before = Reads(model, step)
    held["target"] = nn.Linear(2, 2)
    assert not before.unchanged()
    assert Reads(model, step).first_other(before) is not None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("lambda: sys.getrecursionlimit()", [("sys", "getrecursionlimit")]),
        ("lambda: get_rank() + torch.is_grad_enabled()", [("get_rank",), ("torch", "is_grad_enabled")]),
        ("lambda: [Base.__subclasses__() for _ in range(2)]", [("Base", "__subclasses__")]),
        ("lambda: time.time() + random.random() + torch.seed() + getpass.getpass() + gc.collect()", []),
        ("lambda q: q.get() + os.getenv('A') + issue.closed()", []),
    ],
)
def test_getters_are_found_in_bytecode(text, names):
    assert getters_called(eval(text).__code__) == tuple(names)


def test_getters_that_fail_or_return_something_else_each_time_are_not_compared():
    assert result_of(iter(range(10)).__next__) is None
    assert result_of([].pop) is None
    assert result_of(object) is None
