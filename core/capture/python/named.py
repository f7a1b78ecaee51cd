"""The values that code names: found in its bytecode, without running it; where they are, and how they are compared.

``self.config.beta`` in a method is a use of the attributes ``config`` and ``beta`` of the first parameter;
``stats["loss"] = x`` writes ``stats``, and so does ``losses.append(x)``; ``count += 1`` writes ``count`` and does not
read it otherwise.
"""

import dis
import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from attrs import define, evolve, field, frozen

GLOBAL, FREE, OWNER, VARIABLE, RESULT = "global", "free", "owner", "variable", "result"
"""Where an attribute chain begins: at a global variable, a variable of an enclosing function, the first parameter,
another local variable or an item, or the result of a call or an operator."""
ALL = "*"
"""The end of the name of an attribute whose name is computed, as in ``getattr(self, f"weight_{i}")``."""

_LOADS = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_STORES = {"STORE_GLOBAL": GLOBAL, "STORE_NAME": GLOBAL, "STORE_DEREF": FREE}
_IGNORED = {"CACHE", "NOP", "RESUME", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "KW_NAMES", "COPY_FREE_VARS", "MAKE_CELL"}
_PUSH_NOTHING = ("STORE_", "POP_", "DELETE_", "RETURN", "RAISE", "LIST_", "SET_", "DICT_", "MAP_", "COPY", "SWAP")
_WRITERS = {"append", "appendleft", "extend", "add", "update", "insert", "clear", "write", "writerow"}
"""Methods of containers and files that write and read nothing."""
_ITEMS = ("FOR_ITER", "BINARY_SUBSCR", "STORE_FAST", "COPY")
"""Instructions after which a stored local variable may be an object of the user's, such as a module of a list."""

_AFTER_NAME = {"CALL", "CALL_FUNCTION_EX", "BUILD_STRING", "FORMAT_VALUE", "FORMAT_SIMPLE", "BINARY_OP"}
"""Instructions that take the name given to ``getattr``: the call, or what computes it."""


@frozen
class Use:
    """A use of a value.

    Args:
        root: where the chain begins: ``GLOBAL``, ``FREE``, ``OWNER``, ``VARIABLE`` or ``RESULT``.
        name: of the variable, if the root is ``GLOBAL`` or ``FREE``.
        attributes: on the way from there to the value.
        line: number in the file of the code.
        reads: whether the value is read; otherwise it is only written.
        updates: whether it is written in place, so that it keeps something of what it was, as by ``count += 1``.
        order: of the use in its code.
    """

    root: str
    name: str
    attributes: tuple[str, ...]
    line: int
    reads: bool = True
    order: int = 0
    updates: bool = False


@functools.lru_cache(maxsize=1 << 12)
def uses_in(code: types.CodeType) -> tuple[Use, ...]:
    """The uses of values in code and in the functions that it defines."""
    return tuple(_Scan(code).found())


class _Scan:
    """A pass over the instructions of one function."""

    def __init__(self, code: types.CodeType) -> None:
        self._code = code
        self._all = [i for i in dis.get_instructions(code) if i.opname not in _IGNORED]
        self._owner = code.co_varnames[0] if code.co_argcount else ""
        self._parameters = set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
        self._same: dict[str, list[Use]] = {}  # local variables that are another name of a chain
        self._items = {
            i.argval for place, i in enumerate(self._all) if i.opname == "STORE_FAST" and self._stores_item(place)
        }
        self._line = code.co_firstlineno

    def found(self) -> Iterator[Use]:
        place = 0
        while place < len(self._all):
            now = self._all[place]
            self._line = (now.positions.lineno if now.positions else None) or self._line
            roots = self._roots(now)
            if roots:
                yield from self._chain(roots, place)
            elif now.opname in _STORES:
                kind = _STORES[now.opname]
                yield evolve(self._use(kind, now.argval, (), place, reads=False), updates=self._is_update(place))
            elif now.opname in _ATTRIBUTES and not self._continues(place):
                kind = RESULT if self._all[place - 1].opname.startswith(("CALL", "BINARY_OP")) else VARIABLE
                yield from self._chain([self._use(kind, "", (), place)], place - 1)
            elif now.opname in ("STORE_ATTR", "DELETE_ATTR") and not self._continues(place):
                use = self._use(VARIABLE, "", (now.argval,), place, reads=False)
                yield evolve(use, updates=self._is_update(place))
            place += 1
        for constant in self._code.co_consts:
            if isinstance(constant, types.CodeType):
                for use in uses_in(constant):
                    if use.root == FREE and use.name in self._code.co_cellvars:
                        for root in self._local(use.name):
                            yield evolve(use, root=root.root, attributes=(*root.attributes, *use.attributes))
                    else:
                        yield evolve(use, root=VARIABLE) if use.root == OWNER else use

    def _use(self, root: str, name: str, attributes: tuple[str, ...], place: int, reads: bool = True) -> Use:
        return Use(root, name, attributes, self._line, reads, place)

    def _roots(self, now: dis.Instruction) -> list[Use]:
        """What a load may refer to; empty for other instructions."""
        if not now.opname.startswith(_LOADS):
            return []
        name = now.argval[-1] if isinstance(now.argval, tuple) else now.argval
        if now.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            return [self._use(GLOBAL, name, (), 0)]
        if name in self._code.co_freevars:
            return [self._use(FREE, name, (), 0)]
        return self._local(name)

    def _local(self, name: str) -> list[Use]:
        if name == self._owner:
            return [Use(OWNER, name, (), self._line)]
        item = name in self._parameters or name in self._items
        if name in self._same and not item:
            return self._same[name]
        return [Use(VARIABLE if item else RESULT, "", (), self._line), *self._same.get(name, ())]

    def _continues(self, place: int) -> bool:
        """Whether an instruction is part of a chain that began before it."""
        place -= 1
        while place >= 0 and self._all[place].opname in (*_ATTRIBUTES, "COPY"):
            place -= 1
        return place >= 0 and bool(self._roots(self._all[place]))

    def _chain(self, roots: list[Use], place: int) -> Iterator[Use]:
        """The uses of what is loaded at a place, with the attributes that follow."""
        names: list[str] = []
        start, place = place, place + 1
        while place < len(self._all) and self._all[place].opname in _ATTRIBUTES:
            names.append(self._all[place].argval)
            place += 1
        after = self._all[place] if place < len(self._all) else None
        if after is not None and after.opname == "STORE_FAST":
            self._same[after.argval] = [*self._same.get(after.argval, ()), *self._all_longer(roots, names, start)]
            return
        if after is not None and after.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield from self._all_longer(roots, [*names, after.argval], start, reads=False)
            return
        if after is not None and self._is_getattr(start):
            yield from self._all_longer(roots, [*names, self._name_given(place)], start)
            return
        reads = True
        if after is not None and after.opname == "COPY" and self._all[place + 1].opname == "LOAD_ATTR":
            names.append(self._all[place + 1].argval)  # x.count += 1
            reads = False
        elif names and names[-1] in _WRITERS:
            names.pop()
            reads = False
        elif after is not None:
            reads = not self._only_writes(start, place)
        for use in self._all_longer(roots, names, start, reads):
            yield evolve(use, updates=not reads)

    def _all_longer(self, roots: list[Use], names: list[str], place: int, reads: bool = True) -> list[Use]:
        return [
            evolve(root, attributes=(*root.attributes, *names), line=self._line, reads=reads, order=place)
            for root in roots
        ]

    def _is_getattr(self, place: int) -> bool:
        before = self._all[place - 1] if place else None
        names = ("getattr", "hasattr", "vars")
        return before is not None and before.opname.startswith("LOAD_") and before.argval in names

    def _name_given(self, place: int) -> str:
        """The name that a call of ``getattr`` is given; a computed one ends with ``ALL``, after what it begins with."""
        given = self._all[place]
        if given.opname == "LOAD_CONST" and isinstance(given.argval, str):
            after = (i.opname for i in self._all[place + 1 :] if i.opname in _AFTER_NAME)
            return given.argval + ("" if next(after, "") in ("CALL", "CALL_FUNCTION_EX") else ALL)
        return ALL

    def _only_writes(self, start: int, place: int) -> bool:
        """Whether a loaded value is only the container of an assigned item, or of ``variable += …``."""
        height = 1
        while place < len(self._all):
            now = self._all[place]
            argument = now.arg if now.opcode >= dis.HAVE_ARGUMENT else None
            effect = dis.stack_effect(now.opcode, argument, jump=False)
            pushes = 0 if now.opname.startswith(_PUSH_NOTHING) else 2 if now.opname == "LOAD_METHOD" else 1
            if height - (pushes - effect) < 1:
                break
            height += effect
            place += 1
        else:
            return False
        if now.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            return True
        following = self._all[place + 1] if place + 1 < len(self._all) else None
        inplace = now.opname == "BINARY_OP" and now.argrepr.endswith("=") and following is not None
        return inplace and following.opname in _STORES and following.argval == self._all[start].argval  # type: ignore[union-attr]

    def _is_update(self, place: int) -> bool:
        """Whether a store ends ``variable += …``."""
        before = [i for i in self._all[max(place - 2, 0) : place] if i.opname != "SWAP"]
        return bool(before) and before[-1].opname == "BINARY_OP" and before[-1].argrepr.endswith("=")

    def _stores_item(self, place: int) -> bool:
        """Whether a local variable is assigned an item, such as one of a loop, and not the result of a call."""
        place -= 1
        while place >= 0 and self._all[place].opname in ("STORE_FAST", "UNPACK_SEQUENCE", "SWAP"):
            place -= 1
        return place >= 0 and self._all[place].opname in _ITEMS


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
