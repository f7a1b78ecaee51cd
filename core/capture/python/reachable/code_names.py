"""The names and strings that code uses, from its bytecode, and the lines that read and write them."""

import dis
import functools
import types
from collections.abc import Iterable, Iterator

from ...values.code_origin import is_users_own

_WRITES = {"append", "appendleft", "extend", "add", "update", "insert", "clear", "setdefault"}
"""Methods of containers that write and do not read."""


@functools.lru_cache(maxsize=1 << 12)
def names_in(code: types.CodeType, strings: bool) -> frozenset[str]:
    """Names that code and its nested functions use; if ``strings``, strings as well, which ``getattr`` may get."""
    found = {*code.co_names}
    dynamic = strings or not found.isdisjoint(("getattr", "hasattr", "attrgetter"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant, strings)
        elif dynamic and isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
    return frozenset(found)


@functools.lru_cache(maxsize=1 << 12)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Names that code and its nested functions load as globals; an attribute ``x.loss`` is not the global ``loss``."""
    nested = (globals_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own.union(*nested))


@functools.lru_cache(maxsize=1 << 12)
def prefixes_in(code: types.CodeType) -> frozenset[str]:
    """Prefixes of names that code builds for ``getattr``, as in ``getattr(self, f"weight_{i}")``."""
    found = set[str]().union(*(prefixes_in(c) for c in code.co_consts if isinstance(c, types.CodeType)))
    if "getattr" in code.co_names and any(i.opname == "BUILD_STRING" for i in dis.get_instructions(code)):
        found |= {c for c in code.co_consts if isinstance(c, str) and c and (c + "x").isidentifier()}
    return frozenset(found)


def strings_in(code: types.CodeType) -> set[str]:
    """String constants of code and its nested functions."""
    nested = (strings_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return {c for c in code.co_consts if isinstance(c, str)}.union(*nested)


def line_in(code: types.CodeType, name: str) -> int | None:
    """The first line of a function that names an attribute or variable; None if there is none."""
    line = None
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions is not None else line
        if instruction.argval == name and instruction.opname.startswith(("LOAD_", "STORE_", "BINARY")):
            return line
    nested = (line_in(c, name) for c in code.co_consts if isinstance(c, types.CodeType))
    return next((found for found in nested if found is not None), None)


def read_line(codes: Iterable[types.CodeType], name: str) -> str | None:
    """The user's first line that reads an attribute or variable, except for lines that also write it.

    ``self.n += 1`` and ``self.seen.append(x)`` write; ``if self.n > 3`` reads.

    Args:
        codes: of functions.
        name: of the attribute or variable.

    Returns:
        File and line; None if it is only written.
    """
    for code in codes:
        if is_users_own(code.co_filename) and (line := _first_read(code, name)) is not None:
            return f"{code.co_filename}:{line}"
    return None


def written_line(codes: Iterable[types.CodeType], name: str, only: bool = False) -> str | None:
    """The user's first line that writes an attribute or variable, or that names it if none writes it; None without one.

    Args:
        codes: of functions.
        name: of the attribute or variable.
        only: whether lines that do not write it are left out.
    """
    users = [code for code in codes if is_users_own(code.co_filename)]
    for writes in (True,) if only else (True, False):
        for code in users:
            for instruction in _instructions(code):
                stores = instruction.opname.startswith("STORE_") or not writes
                if instruction.argval == name and stores and instruction.positions is not None:
                    return f"{code.co_filename}:{instruction.positions.lineno}"
    return None


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """The instructions of a function and of its nested functions."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _first_read(code: types.CodeType, name: str) -> int | None:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    lines = [i.positions.lineno if i.positions is not None else None for i in instructions]
    stored = {
        line for i, line in zip(instructions, lines, strict=True)
        if (i.opname.startswith("STORE_") and i.argval == name) or i.opname == "STORE_SUBSCR"
    }  # fmt: skip
    for place, (instruction, line) in enumerate(zip(instructions, lines, strict=True)):
        if instruction.argval != name or not instruction.opname.startswith("LOAD_"):
            continue
        if instruction.opname in ("LOAD_CONST", "LOAD_CLOSURE", "LOAD_FAST") or line in stored:
            continue
        following = instructions[place + 1] if place + 1 < len(instructions) else None
        if following is not None and following.opname.startswith("LOAD_") and following.argval in _WRITES:
            continue
        return line
    nested = (_first_read(c, name) for c in code.co_consts if isinstance(c, types.CodeType))
    return next((line for line in nested if line is not None), None)
