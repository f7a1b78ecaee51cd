"""Calls of functions without arguments that return a setting or a state, such as ``sys.getrecursionlimit()``.

The state is in C, so no attribute that a step reads has it. A function of Python itself, torch or numpy that code calls
without arguments, and whose name says that it only returns something, is called again before each step.
"""

import dis
import functools
import re
import types
from collections.abc import Hashable, Iterator
from typing import Any
from zlib import crc32

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .compared_values import digest_of_array, is_leaf, leaf_key

_GETTER = re.compile(r"(get|is|has|initial|current|default|num|__subclasses__)(?![a-z])|get(?!pass|ch)\w*$|is[a-z]+$")
"""Names of functions that return something and change nothing."""
_MANY = 4096
"""Number of items above which a container is not compared, such as all objects that ``gc.get_objects`` returns."""
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_BETWEEN = ("PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG", "RESUME")


@functools.lru_cache(maxsize=1 << 12)
def getters_called(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The dotted names of functions that code and its nested functions call without arguments, if named as getters."""
    return tuple(dict.fromkeys(_called(code)))


def _called(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    names: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS:
            names = [instruction.argval]
        elif instruction.opname in _ATTRIBUTES:
            names = [*names, instruction.argval] if names else []
        elif instruction.opname == "CALL" and instruction.arg == 0:
            if names and _GETTER.match(names[-1]):
                yield tuple(names)
            names = []
        elif instruction.opname not in _BETWEEN:
            names = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _called(constant)


def result_of(getter: Any) -> Hashable:
    """A key of what a getter returns now; None if it fails, or has another result each time."""
    with torch.utils._python_dispatch._disable_current_modes():
        try:
            found, again = getter(), getter()
        except Exception:  # the getter's own, such as that there is no process group
            return None
        key = _key(found)
        return key if key is not None and key == _key(again) else None


def _key(value: Any) -> Hashable:
    if is_leaf(value):
        return leaf_key(value)
    if isinstance(value, dict | list | tuple | set | frozenset) and len(value) > _MANY:
        return None
    return type(value).__name__, crc32(repr(_state(value)).encode())


def _state(value: Any) -> Any:
    if isinstance(value, dict):
        return [(_state(key), _state(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_state(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, map(_state, value)))
    if isinstance(value, numpy.ndarray):
        return digest_of_array(value)
    if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.device.type == "cpu":
        return digest_of_array(value.detach().numpy())
    return leaf_key(value) if is_leaf(value) else id(value)
