"""Nothing of the user's runs before a step, to find or to compare what the step reads."""

import collections
import functools
import json
import queue
import random
import sys
import types

import numpy
import pytest
import torch
from panpipe.core.capture.python.reachable.known_functions import known_function, library_function, without_users_code
from panpipe.core.capture.python.reads import Reads
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .....support.registry import Registry

cases = Registry()
"""Each gets a list for the calls of the user's functions, and returns what a step calls or reads."""


@cases
def method_of_a_class(calls):
    class Settings:
        @classmethod
        def get_default(cls):
            calls.append("called")
            return 1.0

    return lambda: 1.0 * Settings.get_default()


@cases
def function_with_a_cache(calls):
    @functools.lru_cache
    def get_config():
        calls.append("called")
        return 1.0

    return lambda: 1.0 * get_config()


@cases
def function_without_gradients(calls):
    @torch.no_grad()
    def get_scale():
        calls.append("called")
        return 1.0

    return lambda: 1.0 * get_scale()


@cases
def object_that_is_called(calls):
    class Counter:
        def __call__(self):
            calls.append("called")
            return 1.0

    get_number = Counter()
    return lambda: 1.0 * get_number()


@cases
def partial_of_a_function(calls):
    get_number = functools.partial(calls.append, 1.0)
    return lambda: 1.0 * get_number()


@cases
def iterators_next(calls):
    get_next = map(calls.append, range(10)).__next__
    return lambda: 1.0 * get_next()


@cases
def waiting_queue(calls):
    class Waiting(queue.Queue):
        def get(self, block=True, timeout=None):
            calls.append("called")

    get_item = Waiting().get
    return lambda: 1.0 * get_item()


@cases
def attribute_of_a_module(calls):
    module = types.ModuleType("settings")
    module.__getattr__ = calls.append
    return lambda: 1.0 * module.get_number()


@cases
def property_of_a_class(calls):
    class Computed:
        def __get__(self, instance, owner):
            calls.append("called")
            return sys

    class Settings:
        system = Computed()

    return lambda: 1.0 * Settings.system.getrecursionlimit()


@cases
def list_with_its_own_items(calls):
    class Endless(list):
        def __iter__(self):
            calls.append("called")
            return iter([])

        def __len__(self):
            calls.append("called")
            return 3

    held = Endless([1.0, 2.0])
    return lambda: held[0]


@cases
def dict_with_its_own_items(calls):
    class Counting(dict):
        def items(self):
            calls.append("called")
            return super().items()

        def __getitem__(self, key):
            calls.append("called")
            return super().__getitem__(key)

        def __iter__(self):
            calls.append("called")
            return super().__iter__()

    held = Counting(a=1.0)
    return lambda: held["a"]


@cases
def length_of_a_data_set(calls):
    class Lines(Dataset):
        def __len__(self):
            calls.append("called")
            return 3

    loader = DataLoader(Lines())
    del calls[:]
    return lambda: float(len(loader))


@pytest.mark.parametrize("make", cases.values(), ids=list(cases))
def test_nothing_of_the_users_is_called(make):
    calls = []
    read = make(calls)

    def step(m, b):
        return m(b).sum() * read()

    reads = Reads(nn.Linear(2, 2), step)
    assert calls == []
    assert reads.unchanged()
    assert calls == []


@pytest.mark.parametrize(
    "names",
    [
        ("sys", "getrecursionlimit"), ("random", "getstate"), ("numpy", "random", "get_state"),
        ("torch", "initial_seed"),
        ("torch", "is_anomaly_enabled"), ("torch", "cuda", "is_available"), ("getstate",), ("Own", "__subclasses__"),
    ],
)  # fmt: skip
def test_functions_of_python_torch_and_numpy_may_be_called(names):
    class Own:
        """A class."""

    variables = {
        "sys": sys, "random": random, "numpy": numpy, "torch": torch, "getstate": random.getstate, "Own": Own,
    }  # fmt: skip
    assert callable(known_function(names, variables))


def test_methods_of_the_users_own_objects_are_not_called():
    generator = random.Random(3)
    assert known_function(("get_number",), {"get_number": generator.random}) is None
    assert known_function(("get_state",), {"get_state": generator.getstate}) is None


def test_functions_of_other_packages_are_not_called():
    import networkx

    variables = {"networkx": networkx}
    assert known_function(("networkx", "is_directed"), variables) is None
    assert library_function(("networkx", "is_directed"), variables) is networkx.is_directed
    assert library_function(("json", "loads"), {"json": json}) is None


def test_a_call_ends_before_it_runs_a_function_of_the_users():
    calls = []
    assert without_users_code(lambda: 3) is None  # it is the user's itself
    assert without_users_code(functools.partial(sorted, [1, 2])) == [1, 2]
    assert without_users_code(functools.partial(sorted, [1, 2], key=lambda _: calls.append("called"))) is None
    assert without_users_code(functools.partial(collections.namedtuple, "Pair", "a b")) is not None
    assert calls == []
