"""Values that the code of a step does not name: computed names, all attributes of an object, attributes of numbers and
containers, code and classes that are exchanged, hooks and modes around the step."""

import collections
import dataclasses
import enum
import functools
import operator
import threading
import types

import attrs
import numpy
import pytest
import torch
from panpipe.core.capture.python.reachable.used_names import used_names
from panpipe.core.capture.python.reads import Reads
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from .....support.programs.noticed import assert_noticed
from .....support.registry import Registry

cases = Registry()
"""Each returns a function that reads a number, and one that sets it."""


class Holder:
    """An object of the user's."""

    def __init__(self, **values):
        self.__dict__.update(values)


def by(read):
    """A case of an object with two weights, read by a function of it."""
    held = Holder(weight_ce=1.0, weight_l1=0.0)
    return lambda: read(held), lambda number: setattr(held, "weight_ce", number)


NAMES = ["ce"]
for name, reader in {
    "all_values": lambda held: sum(vars(held).values()),
    "items_of_the_dict": lambda held: sum(value for _, value in held.__dict__.items()),
    "name_in_a_list": lambda held: sum(getattr(held, "weight_" + name) for name in NAMES),
    "name_that_is_formatted": lambda held: getattr(held, "weight_{}".format("ce")),
    "name_by_percent": lambda held: getattr(held, "weight_%s" % NAMES[0]),  # noqa: UP031
    "name_that_is_joined": lambda held: getattr(held, "_".join(("weight", "ce"))),
    "name_that_ends_alike": lambda held: getattr(held, f"{'weight'}_ce"),
    "name_in_lower_case": lambda held: getattr(held, "WEIGHT_CE".lower(), 0.0),
    "names_of_dir": lambda held: sum(getattr(held, name) for name in dir(held) if name.startswith("weight")),
    "keywords": lambda held: dict(**vars(held))["weight_ce"],
    "attrgetter": operator.attrgetter("weight_ce"),
}.items():
    cases[name] = functools.partial(by, reader)


@cases
def dataclass_as_a_dict():
    @dataclasses.dataclass
    class Weights:
        ce: float = 1.0

    held = Weights()
    return lambda: sum(dataclasses.asdict(held).values()), lambda number: setattr(held, "ce", number)


@cases
def slots_of_an_attrs_class_as_a_dict():
    @attrs.define
    class Weights:
        ce: float = 1.0

    held = Weights()
    return lambda: sum(attrs.asdict(held).values()), lambda number: setattr(held, "ce", number)


@cases
def dotted_name():
    held = Holder(inner=Holder(beta=1.0))
    return lambda: operator.attrgetter("inner.beta")(held), lambda number: setattr(held.inner, "beta", number)


def with_attribute(held):
    """A case of a number or container that has an attribute, too."""
    held.beta = 1.0
    return lambda: held.beta, lambda number: setattr(held, "beta", number)


class Pair(collections.namedtuple("Both", "one other")):
    """A tuple with attributes."""


class Level(enum.Enum):
    """A member of it has an attribute."""

    LOW = 1


for held in (
    type("Whole", (int,), {})(1),
    type("Text", (str,), {})("low"),
    type("Items", (list,), {})([1]),
    type("Table", (dict,), {})(a=1),
    type("Group", (set,), {})([1]),
    type("Array", (numpy.ndarray,), {})(2),
    Pair(1, 2),
    Level.LOW,
    ValueError("low"),
    functools.partial(abs),
    threading.Thread(),
):
    cases[f"attribute_of_{type(held).__name__.lower()}"] = functools.partial(with_attribute, held)


@cases
def class_of_an_object():
    class Low:
        def beta(self):
            return 1.0

    class High(Low):
        def beta(self):
            return 2.0

    held = Low()
    return lambda: held.beta() + 0.0, lambda number: setattr(held, "__class__", High)


@cases
def class_of_a_module():
    held = nn.Identity()
    other = type("Doubled", (nn.Identity,), {"forward": lambda self, x: 2 * x})
    return lambda: held(1.0), lambda number: setattr(held, "__class__", other)


@cases
def code_of_a_function():
    def low():
        return 1.0

    def high():
        return 2.0

    return low, lambda number: setattr(low, "__code__", high.__code__)


@cases
def defaults_of_keywords():
    def read(*, beta=1.0):
        return beta

    return read, lambda number: setattr(read, "__kwdefaults__", {"beta": number})


@cases
def number_of_a_data_set():
    class Rows(Dataset):
        beta = 1.0

        def __len__(self):
            return 2

    loader = DataLoader(Rows())
    return lambda: loader.dataset.beta, lambda number: setattr(loader.dataset, "beta", number)


@cases
def property_of_another_package():
    thread = threading.Thread(name="1.0")
    return lambda: float(thread.name), lambda number: setattr(thread, "name", str(number))


@cases
def backward_of_an_autograd_function():
    held = Holder(beta=1.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * held.beta

    def read():
        x = torch.ones((), requires_grad=True)
        return float(torch.autograd.grad(Scaled.apply(x), x)[0])

    return read, lambda number: setattr(held, "beta", number)


@pytest.mark.parametrize("make", cases.values(), ids=list(cases))
def test_changed_value_is_noticed(make):
    assert_noticed(*make())


def plain_step(model, batch):
    return torch.tanh(model(batch)).square().sum()


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def changes():
    """Each changes something around a step, and returns what undoes it."""
    yield "hook_of_all_modules", lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None).remove
    yield (
        "hook_before_all_modules",
        lambda _: nn.modules.module.register_module_forward_pre_hook(lambda *_: None).remove,
    )
    yield "hook_on_a_gradient", lambda model: model.weight.register_hook(lambda gradient: gradient).remove
    yield (
        "hook_after_accumulation",
        lambda model: model.weight.register_post_accumulate_grad_hook(lambda p: None).remove,
    )
    yield "hook_of_a_backward", lambda model: model.register_full_backward_hook(lambda *_: None).remove
    yield "mode", _mode
    yield "function_of_torch", lambda _: _replaced(torch, "tanh", torch.relu)
    yield "method_of_tensors", lambda _: _replaced(torch.Tensor, "square", torch.Tensor.abs)
    yield "forward_of_torch", lambda _: _replaced(nn.Linear, "forward", lambda self, x: x)


def _mode(_model):
    mode = Doubling()
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


def _replaced(owner, name, value):
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if own else delattr(owner, name)


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in changes()])
def test_change_around_a_step_is_noticed(change):
    model = nn.Linear(2, 2)
    before = Reads(model, plain_step)
    undo = change(model)
    try:
        assert not before.unchanged()
        assert Reads(model, plain_step).first_other(before) is not None
    finally:
        undo()
    assert before.unchanged()


def test_only_computed_names_make_all_attributes_values():
    held = Holder(beta=1.0, step=0)

    def step(m, b):
        return m(b).sum() * getattr(held, "beta") * getattr(held, "gamma", 1.0) * held.beta  # noqa: B009

    before = Reads(nn.Linear(2, 2), step)
    held.step = 1
    assert before.unchanged()


@pytest.mark.parametrize(
    ("text", "computed"),
    [
        ("lambda s: getattr(s, 'a')", False),
        ("lambda s: getattr(s.b[0], 'a', None)", False),
        ("lambda s, i: getattr(s, f'a{i}')", False),
        ("lambda s: getattr(getattr(s, 'a'), 'b')", False),
        ("lambda s: f(getattr(s, 'a')(1, 2), x=getattr(s, 'k', False))", False),
        ("lambda s: 1 if getattr(s, 'a') else [getattr(x, 'b') for x in s]", False),
        ("lambda s, i: getattr(s, f'{i}a')", True),
        ("lambda s, n: getattr(s, n)", True),
        ("lambda s, n: getattr(s, 'a' + n)", True),
        ("lambda s: getattr(s, 'A'.lower(), 1)", True),
        ("lambda s, n: sum(getattr(s, k) for k in n)", True),
    ],
)
def test_computed_names_are_found_in_bytecode(text, computed):
    code: types.CodeType = eval(text).__code__
    assert used_names(code, True).any_name is computed
    assert not used_names(code, False).any_name
