"""How values are compared between two runs or two steps: by value, by a digest, or by identity."""

import enum
import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy
import torch

_LEAVES = (int, float, complex, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout,
           torch.memory_format, torch.Size, numpy.generic, range, slice, Path)  # fmt: skip


def is_leaf(value: Any) -> bool:
    """Whether a value is compared by value."""
    return isinstance(value, _LEAVES)


def leaf_key(value: Any) -> Hashable:
    """A key that is equal for equal values of one type; NaN equals NaN."""
    if isinstance(value, slice):
        return "slice", repr(value)
    return type(value).__name__, repr(value) if isinstance(value, float) and math.isnan(value) else value


_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def plain_class(container: Any) -> Any:
    """The built-in class of a container; its methods run no code of a class that is derived from it.

    An ``OrderedDict`` is one of its own, because it has its own order.
    """
    if isinstance(container, OrderedDict):
        return OrderedDict
    return next(kind for kind in _CONTAINERS if isinstance(container, kind))


def has_plain_items(container: Any) -> bool:
    """Whether ``len(container)`` and ``iter(container)`` run no code of a derived class."""
    plain, kind = plain_class(container), type(container)
    return kind.__len__ is plain.__len__ and kind.__iter__ is plain.__iter__


def plain_items(container: Any) -> list[Any]:
    """The items of a container, or the keys of a dict."""
    return list(container) if has_plain_items(container) else list(plain_class(container).__iter__(container))


def items_of(container: Any) -> Iterator[Any]:
    """The items of a container; keys and values of a dict."""
    if isinstance(container, dict):
        return chain(plain_items(container), (dict.__getitem__(container, key) for key in plain_items(container)))
    return iter(plain_items(container))


def digest_of_items(container: Any) -> int:
    """32 bits over the values in a container, the same in every process; for objects, over their identities."""
    return crc32(repr([leaf_key(item) if is_leaf(item) else id(item) for item in items_of(container)]).encode())


def digest_of_array(value: Any) -> int:
    """32 bits over an array's values; the identity of an array that cannot be written."""
    if isinstance(value, numpy.ndarray):
        if not value.flags.writeable:
            return id(value)
        value = value if value.flags.c_contiguous else numpy.ascontiguousarray(value)
        return hash(tuple(map(id, value.flat))) if value.dtype.hasobject else crc32(value.view(numpy.uint8).data)
    return crc32(memoryview(value))


def is_number(value: Any) -> bool:
    """Whether a value is a number, and not a late number, which ``isinstance`` accepts."""
    return issubclass(type(value), int | float) and type(value) is not bool
