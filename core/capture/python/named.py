"""The values that code names: found in its bytecode, without running it; where they are, and how they are compared.

``self.config.beta`` in a method is a use of the attribute ``config`` of the first parameter, and of the attribute
``beta`` of some object; ``stats["loss"] = x`` writes ``stats``, and so does ``losses.append(x)``; ``count += 1`` writes
``count`` and does not read it otherwise.
"""

import dis
import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from attrs import define, evolve, field, frozen

GLOBAL, FREE, OWNER, RESULT, ATTRIBUTE = "global", "free", "owner", "result", "attribute"
"""What a name means: a global variable, a variable of an enclosing function, an attribute of the first parameter, of
the result of a call or an operator, or of some object."""
ALL = "*"
"""The end of the name of an attribute whose name is computed, as in ``getattr(self, f"weight_{i}")``."""

_LOADS = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_STORES = {"STORE_GLOBAL": GLOBAL, "STORE_NAME": GLOBAL, "STORE_DEREF": FREE}
_IGNORED = {"CACHE", "NOP", "RESUME", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "KW_NAMES", "COPY_FREE_VARS", "MAKE_CELL"}
_MOVES = ("COPY", "SWAP")
_RESULTS = ("CALL", "BINARY_OP")
"""Instructions whose result is no object that existed before, as far as an attribute of it is concerned."""
_WRITERS = {"append", "appendleft", "extend", "add", "update", "insert", "clear", "write", "writerow"}
"""Methods of containers and files that write and read nothing."""
_AFTER_NAME = {"CALL", "CALL_FUNCTION_EX", "BUILD_STRING", "FORMAT_VALUE", "FORMAT_SIMPLE", "BINARY_OP"}
"""Instructions that take the name given to ``getattr``: the call, or what computes it."""


@frozen
class Use:
    """A use of a value.

    Args:
        kind: ``GLOBAL``, ``FREE``, ``OWNER``, ``RESULT`` or ``ATTRIBUTE``.
        name: of the variable or the attribute.
        line: number in the file of the code.
        reads: whether the value is read; otherwise it is only written.
        order: of the use in its code.
        updates: whether it is written in place, so that it keeps something of what it was, as by ``count += 1``.
    """

    kind: str
    name: str
    line: int
    reads: bool = True
    order: int = 0
    updates: bool = False


@functools.lru_cache(maxsize=1 << 12)
def uses_in(code: types.CodeType) -> tuple[Use, ...]:
    """The uses of values in code and in the functions that it defines."""
    return tuple(_uses(code))


def _uses(code: types.CodeType) -> Iterator[Use]:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _IGNORED]
    owner = code.co_varnames[0] if code.co_argcount else ""
    results = _names_of_results(code, instructions)
    updated = _updated(instructions)
    line = code.co_firstlineno
    last = instructions[0]
    for place, now in enumerate(instructions):
        line = (now.positions.lineno if now.positions else None) or line
        before, last = last, last if now.opname in _MOVES else now
        name, updates = str(now.argval), place in updated or any(map(_is_writer, instructions[place + 1 : place + 2]))
        if now.opname in _ATTRIBUTES and not _is_writer(now):
            yield Use(_kind_of_attribute(before, owner, results), name, line, not updates, place, updates)
        elif _ends_update(before):
            continue  # the load before it is the use
        elif now.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield Use(_kind_of_attribute(before, owner, results), name, line, False, place)
        elif now.opname in _STORES:
            yield Use(_STORES[now.opname], name, line, False, place)
        elif now.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield Use(GLOBAL, name, line, not updates, place, updates)
            if name in ("getattr", "hasattr", "vars"):
                given, holder = _name_given(instructions[place + 1 :])
                yield Use(_kind_of_attribute(holder, owner, results), given, line, True, place)
        elif now.opname.startswith(_LOADS) and name in code.co_freevars:
            yield Use(FREE, name, line, not updates, place, updates)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for use in uses_in(constant):
                if use.kind != FREE or use.name not in code.co_cellvars:
                    yield evolve(use, kind=ATTRIBUTE) if use.kind == OWNER else use


def _variable(now: dis.Instruction) -> str:
    """Name of the variable that an instruction loads; "" for others."""
    if not now.opname.startswith(_LOADS):
        return ""
    return str(now.argval[-1] if isinstance(now.argval, tuple) else now.argval)


def _is_writer(now: dis.Instruction) -> bool:
    return now.opname in _ATTRIBUTES and now.argval in _WRITERS


def _kind_of_attribute(before: dis.Instruction, owner: str, results: set[str]) -> str:
    """Whose attribute is used after an instruction."""
    name = _variable(before)
    if name and name == owner:
        return OWNER
    return RESULT if before.opname.startswith(_RESULTS) or name in results else ATTRIBUTE


def _names_of_results(code: types.CodeType, instructions: Sequence[dis.Instruction]) -> set[str]:
    """Local variables that are only assigned results of calls and operators."""
    found, others = set[str](), set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    made = False
    for now in instructions:
        if now.opname == "STORE_FAST":
            (found if made else others).add(now.argval)
        elif now.opname not in ("UNPACK_SEQUENCE", "SWAP"):
            made = now.opname.startswith(_RESULTS)
    return found - others


def _updated(instructions: Sequence[dis.Instruction]) -> set[int]:
    """Places of the loads of what is only written in place: of ``x`` in ``x += 1`` and in ``x[i] = 1``."""
    loads: dict[Any, list[tuple[Any, int]]] = {}
    found = set[int]()
    for place, now in enumerate(instructions):
        where = now.positions
        if where is None or where.col_offset is None:
            continue
        begin, end = (where.lineno, where.col_offset), (where.end_lineno, where.end_col_offset)
        if now.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") or _ends_update(now):
            shorter = [each for each in loads.get(begin, ()) if each[0] < end]
            found |= {place for _, place in sorted(shorter)[-1:]}
        elif now.opname not in _MOVES:
            loads.setdefault(begin, []).append((end, place))
    return found


def _ends_update(now: dis.Instruction) -> bool:
    """Whether an instruction computes ``x += …``."""
    return now.opname == "BINARY_OP" and now.argrepr.endswith("=")


def _name_given(after: Sequence[dis.Instruction]) -> tuple[str, dis.Instruction]:
    """The name that a call of ``getattr`` is given, and the instruction that loads the object.

    A computed name ends with ``ALL``, after what it begins with.
    """
    number = next((i for i, now in enumerate(after) if i and now.opname not in _ATTRIBUTES), len(after) - 1)
    given = after[number]
    if given.opname != "LOAD_CONST" or not isinstance(given.argval, str):
        return ALL, after[number - 1]
    taken = (now.opname for now in after[number + 1 :] if now.opname in _AFTER_NAME)
    return given.argval + ("" if next(taken, "") in ("CALL", "CALL_FUNCTION_EX") else ALL), after[number - 1]


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
