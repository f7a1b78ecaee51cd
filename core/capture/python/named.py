"""Values that code names: where they are, how they are compared, and the lines that read and write them."""

import enum
import sys
import types
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from attrs import define, field

from .code_uses import Use

MISSING = object()
"""In place of a value that is not there."""
_PLAIN = (int, float, complex, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout,
          torch.memory_format, torch.Size, numpy.generic, range, slice, Path)  # fmt: skip
CONTAINERS = (list, dict, tuple, set, frozenset, deque)
SMALL = 256
"""Largest number of items of a container whose items are compared; a larger one is compared by its identity."""


def is_plain(value: Any) -> bool:
    """Whether a value is compared by value: a number, a text, a flag, None and the like."""
    return issubclass(type(value), _PLAIN)  # `isinstance` asks the object


def is_small_container(value: Any) -> bool:
    """Whether a value is a container whose items are compared."""
    return issubclass(type(value), CONTAINERS) and len(items_of(value)) <= SMALL


def items_of(container: Any) -> list[Any]:
    """The items of a container, without calls of a derived class; keys and values of a dict."""
    for kind in CONTAINERS:
        if issubclass(type(container), kind):
            break
    items = list(kind.__iter__(container))
    return items if kind is not dict else [*items, *dict.values(container)]


@define(eq=False)
class Named:
    """A value that code names.

    Args:
        place: as text, such as ``model.scale``.
        holder: what holds it: a dict, a cell, a class, or an object with slots.
        key: in the dict, or name of the attribute or slot; None for a cell.
        value: there.

    Attributes:
        read_at, written_at: the first line that reads it, and the first that writes it; "" if there is none.
        early: whether a function reads it before it sets it, or another function than the one that sets it reads it.
        carried: whether a function reads it and sets it after that, or it is read and updated, as by ``count += 1``.
        is_set: whether the code sets it, so that it may be no input of the step.
    """

    place: str
    holder: Any
    key: Any
    value: Any
    read_at: str = ""
    written_at: str = ""
    _read: dict[types.CodeType, int] = field(factory=dict)
    _written: dict[types.CodeType, int] = field(factory=dict)
    _updated: bool = False

    @property
    def early(self) -> bool:
        return any(order < self._written.get(code, sys.maxsize) for code, order in self._read.items())

    @property
    def carried(self) -> bool:
        if self._updated and self._read:
            return True
        return any(order < self._written.get(code, -1) for code, order in self._read.items())

    @property
    def is_set(self) -> bool:
        return bool(self._written) and not self.carried

    def note(self, code: types.CodeType, use: Use) -> None:
        """Add a use of the value."""
        line = f"{code.co_filename}:{use.line}"
        if use.updates:
            self._updated = True
        else:
            orders = self._read if use.reads else self._written
            orders[code] = min(use.order, orders.get(code, use.order))
        if use.reads:
            self.read_at = self.read_at or line
        else:
            self.written_at = self.written_at or line

    def assign(self, value: Any) -> None:
        """Put a value there; `MISSING` removes it."""
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            if value is MISSING:
                self.holder.pop(self.key, None)
            else:
                self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)

    @property
    def getter(self) -> Callable[[], Any]:
        """Returns the present value; raises an error, or returns `MISSING`, if there is none."""
        if isinstance(self.holder, dict | type):
            return partial((self.holder if isinstance(self.holder, dict) else vars(self.holder)).get, self.key, MISSING)
        return partial(getattr, self.holder, self.key or "cell_contents")

    def now(self) -> Any:
        """The present value; `MISSING` if there is none."""
        try:
            return self.getter()
        except (AttributeError, ValueError):
            return MISSING
