"""The names of attributes that code uses: constant ones, those with a constant beginning, or any name at all."""

import dis
import functools
import types
from typing import Any

from attrs import frozen

from .code_names import names_in, prefixes_in

_ALL_ATTRIBUTES = {"vars", "__dict__", "asdict", "astuple", "fields", "dir", "getmembers", "__getattribute__",
                   "attrgetter", "methodcaller"}  # fmt: skip
"""Names of what reads attributes without naming them in the code."""

_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"


@frozen
class UsedNames:
    """Names of attributes.

    Args:
        names: whole names.
        prefixes: beginnings of names.
        any_name: whether code also reads attributes whose names it computes, or all attributes of an object.
    """

    names: frozenset[str] = frozenset()
    prefixes: frozenset[str] = frozenset()
    any_name: bool = False

    def __contains__(self, name: str) -> bool:
        return name in self.names or (bool(self.prefixes) and name.startswith(tuple(self.prefixes)))

    def __or__(self, other: "UsedNames") -> "UsedNames":
        return UsedNames(self.names | other.names, self.prefixes | other.prefixes, self.any_name or other.any_name)


@functools.lru_cache(maxsize=1 << 12)
def used_names(code: types.CodeType, users: bool) -> UsedNames:
    """The names that code and its nested functions use.

    Args:
        code: of a function.
        users: whether it is the user's own: then strings count as names, and computed names are looked for.
    """
    names = names_in(code, users)
    computed = users and (not names.isdisjoint(_ALL_ATTRIBUTES) or _computes_a_name(code))
    return UsedNames(names, prefixes_in(code), computed)


def names_of_getter(getter: Any) -> frozenset[str]:
    """The names that an ``attrgetter`` or a ``methodcaller`` looks up."""
    given = getter.__reduce__()[1]
    return frozenset(part for name in given if isinstance(name, str) for part in name.split("."))


def _computes_a_name(code: types.CodeType) -> bool:
    """Whether code calls ``getattr`` with a name that is neither a constant nor begins with one."""
    nested = any(_computes_a_name(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return nested or ("getattr" in code.co_names and not all(_names_given(code)))


def _names_given(code: types.CodeType) -> list[bool]:
    """For each call of ``getattr``, whether its second argument is a constant, or text that begins with one.

    The height of the stack is followed from the load of ``getattr`` to its call; the instruction that wrote the slot
    above the object is the one that gives the name; for text of several parts, the one that wrote the first part.
    """
    found: list[bool] = []
    waiting: list[tuple[int, int]] = []  # height after each load of getattr, and its place in ``found``
    writer: dict[int, dis.Instruction] = {}
    height = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == _CALL and waiting and height - (instruction.arg or 0) == waiting[-1][0]:
            base, place = waiting.pop()
            found[place] = (name := writer.get(base + 2)) is not None and name.opname == "LOAD_CONST"
        begins = instruction.opname == "BUILD_STRING" and writer.get(height - (instruction.arg or 0) + 1)
        argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
        before, height = height, height + dis.stack_effect(instruction.opcode, argument, jump=False)
        for slot in range(min(before + 1, height), height + 1):
            writer[slot] = begins or instruction
        if instruction.opname.startswith("LOAD_") and instruction.argval == "getattr":
            waiting.append((height, len(found)))
            found.append(False)
    return found
