"""Values that a step reads through an object of the standard library, a module, a class or a builtin are compared."""

import builtins
import collections
import configparser
import contextvars
import ctypes
import io
import logging
import mmap
import multiprocessing
import queue
import threading
import types
import weakref

import numpy
import pytest
import torch
from torch import nn

from .....support.programs.noticed import assert_noticed
from .....support.registry import Registry

cases = Registry()
"""Each returns a function that reads a number, and one that sets it."""


@cases
def context_variable():
    variable = contextvars.ContextVar("variable", default=1.0)
    return variable.get, variable.set


@cases
def user_dict():
    held = collections.UserDict(beta=1.0)
    return lambda: held["beta"], lambda number: held.update(beta=number)


@cases
def user_list():
    held = collections.UserList([1.0])
    return lambda: held[0], lambda number: held.__setitem__(0, number)


@cases
def chain_map():
    held = collections.ChainMap({"beta": 1.0}, {"other": 2.0})
    return lambda: held["beta"], lambda number: held.update(beta=number)


@cases
def read_only_view_of_a_dict():
    held = {"beta": 1.0}
    view = types.MappingProxyType(held)
    return lambda: view["beta"], lambda number: held.update(beta=number)


class Holder:
    """An object of the user's."""

    beta = 1.0

    def __init__(self):
        self.kept = 1.0


@cases
def weak_reference():
    held = Holder()
    reference = weakref.ref(held)
    return lambda: reference().kept, lambda number: setattr(held, "kept", number)


@cases
def weak_proxy():
    held = Holder()
    proxy = weakref.proxy(held)
    return lambda: proxy.kept, lambda number: setattr(held, "kept", number)


@cases
def dict_of_weak_values():
    held = Holder()
    table = weakref.WeakValueDictionary(one=held)
    return lambda: table["one"].kept, lambda number: setattr(held, "kept", number)


@cases
def dict_of_weak_keys():
    held = Holder()
    table = weakref.WeakKeyDictionary({held: 1.0})
    return lambda: table[held], lambda number: table.update({held: number})


@cases
def number_shared_by_processes():
    shared = multiprocessing.Value("d", 1.0)
    return lambda: shared.value, lambda number: setattr(shared, "value", number)


@cases
def shared_number_without_a_lock():
    shared = multiprocessing.Value("d", 1.0, lock=False)
    return lambda: shared.value, lambda number: setattr(shared, "value", number)


@cases
def array_shared_by_processes():
    shared = multiprocessing.Array("d", [3.0, 1.0])
    return lambda: shared[1], lambda number: shared.__setitem__(1, number)


@cases
def attribute_of_a_thread():
    local = threading.local()
    local.beta = 1.0
    return lambda: local.beta, lambda number: setattr(local, "beta", number)


@cases
def event_between_threads():
    event = threading.Event()
    return lambda: 2.0 if event.is_set() else 1.0, lambda number: event.set()


@cases
def first_of_a_queue():
    held = queue.Queue()
    held.put(1.0)
    return lambda: held.queue[0], lambda number: (held.get(), held.put(number))


@cases
def configuration_file():
    config = configparser.ConfigParser()
    config["train"] = {"beta": "1.0"}
    section = config["train"]
    return lambda: section.getfloat("beta"), lambda number: config.set("train", "beta", str(number))


@cases
def text_in_memory():
    held = io.StringIO("1.0")
    return lambda: float(held.getvalue()), lambda number: (held.seek(0), held.write(str(number)))


@cases
def level_of_a_logger():
    logger = logging.getLogger("tests.standard_objects")
    return lambda: 2.0 if logger.isEnabledFor(logging.DEBUG) else 1.0, lambda number: logger.setLevel(logging.DEBUG)


@cases
def module_that_is_made():
    made = types.ModuleType("made")
    made.beta = 1.0
    return lambda: made.beta, lambda number: setattr(made, "beta", number)


@cases
def number_in_a_module_of_another_package():
    torch.beta_of_a_test = 1.0
    return lambda: torch.beta_of_a_test, lambda number: setattr(torch, "beta_of_a_test", number)


@cases
def builtin_of_the_user():
    builtins.beta_of_a_test = 1.0
    return lambda: beta_of_a_test, lambda number: setattr(builtins, "beta_of_a_test", number)  # noqa: F821


@cases
def class_that_is_a_variable():
    class Config:
        beta = 1.0

    return lambda: Config.beta, lambda number: setattr(Config, "beta", number)


@cases
def number_of_a_class_of_torch():
    nn.Module.beta_of_a_test = 1.0
    return lambda: nn.Linear.beta_of_a_test, lambda number: setattr(nn.Module, "beta_of_a_test", number)


@cases
def property_of_a_metaclass():
    class Meta(type):
        @property
        def beta(cls):
            return cls._beta

    class Config(metaclass=Meta):
        _beta = 1.0

    return lambda: Config.beta, lambda number: setattr(Config, "_beta", number)


BETA = 1.0


@cases
def name_in_globals():
    return lambda: globals()["BETA"], lambda number: globals().update(BETA=number)


@cases
def attribute_of_a_tensor():
    tensor = torch.zeros(2)
    tensor.beta = 1.0
    return lambda: tensor.beta, lambda number: setattr(tensor, "beta", number)


@cases
def object_in_a_numpy_array():
    held = numpy.array([{"beta": 1.0}], dtype=object)
    return lambda: held[0]["beta"], lambda number: held[0].update(beta=number)


@cases
def structure_of_c():
    class Options(ctypes.Structure):
        _fields_ = [("beta", ctypes.c_double)]

    options = Options(1.0)
    return lambda: options.beta, lambda number: setattr(options, "beta", number)


@cases
def view_of_bytes():
    held = bytearray(b"\x01\x02")
    view = memoryview(held)
    return lambda: float(view[0]), lambda number: held.__setitem__(0, int(number))


@cases
def mapped_memory():
    held = mmap.mmap(-1, 16)
    held[0] = 1
    return lambda: float(held[0]), lambda number: held.__setitem__(0, int(number))


@cases
def lock():
    held = threading.Lock()
    return lambda: 1.0 + held.locked(), lambda number: held.acquire()


@cases
def semaphore():
    held = threading.Semaphore(1)
    return lambda: float(held._value), lambda number: held.release()


@pytest.fixture(autouse=True)
def as_before():
    """What cases add to others' classes and modules is removed."""
    yield
    for owner in (torch, builtins, nn.Module):
        if hasattr(owner, "beta_of_a_test"):
            del owner.beta_of_a_test
    logging.getLogger("tests.standard_objects").setLevel(logging.NOTSET)
    globals()["BETA"] = 1.0


@pytest.mark.parametrize("make", cases.values(), ids=list(cases))
def test_changed_value_is_noticed(make):
    assert_noticed(*make())
