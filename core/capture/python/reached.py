"""What a step can reach: the functions that it may call, the names that their code uses, the objects that it may read.

The walk begins at the step and the model's modules. From an object it goes to the attributes whose names occur in
reached code; from a function to its globals, the variables around it, its defaults. More code has more names, so it is
repeated until no name is new.
"""

import dis
import enum
import functools
import io
import math
import os
import stat
import sys
import types
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy
import torch
from torch import Tensor, nn

from ..values.code_origin import Origin, is_users_own, origin_of

_LEAVES = (int, float, complex, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout,
           torch.memory_format, torch.Size, numpy.generic, range, slice, Path)  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.MethodType, functools._lru_cache_wrapper)
_MANY, _MOST = 4096, 50_000
"""Entries of a container above which values are compared by a digest; and above which objects in it are compared by
their identity alone, as those of a data set are."""
_DEEPEST = 40

_SPECIAL = {"_parameters", "_buffers", "_modules", "training", "_forward_hooks", "_forward_pre_hooks"}
_NOT_RUN = {"__init__", "__new__", "__repr__", "__str__", "__setattr__", "__delattr__", "__del__", "__reduce__",
            "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__", "__init_subclass__",
            "__subclasshook__", "__dir__", "__sizeof__", "__class_getitem__", "__hash__"}  # fmt: skip


def is_leaf(value: Any) -> bool:
    """Whether a value is compared by value."""
    return isinstance(value, _LEAVES)


def leaf_key(value: Any) -> Hashable:
    """What two equal values of one type have in common; NaN equals NaN."""
    if isinstance(value, slice):
        return "slice", repr(value)
    return type(value).__name__, repr(value) if isinstance(value, float) and math.isnan(value) else value


@functools.cache
def _origin_of_class(kind: type) -> Origin:
    module = sys.modules.get(kind.__module__)
    if kind.__module__ in ("builtins", "_io"):
        return Origin.INTERNAL
    file = getattr(module, "__file__", None)
    if file is not None:
        return origin_of(file)
    return Origin.USER if module is None or kind.__module__ == "__main__" else Origin.INTERNAL


@functools.cache
def _names(code: types.CodeType, strings: bool) -> frozenset[str]:
    """Names that code uses, with those in functions within; ``strings`` as well, which ``getattr`` may be given."""
    found = {*code.co_names}
    dynamic = strings or not found.isdisjoint(("getattr", "hasattr", "attrgetter"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant, strings)
        elif dynamic and isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
    return frozenset(found)


@functools.cache
def _starts(code: types.CodeType) -> frozenset[str]:
    """How names begin that code makes for ``getattr``, as in ``getattr(self, f"weight_{i}")``."""
    found = set[str]().union(*(_starts(c) for c in code.co_consts if isinstance(c, types.CodeType)))
    if "getattr" in code.co_names and any(i.opname == "BUILD_STRING" for i in dis.get_instructions(code)):
        found |= {c for c in code.co_consts if isinstance(c, str) and c and (c + "x").isidentifier()}
    return frozenset(found)


class Reached:
    """What was reached.

    Attributes:
        values: place, in words → what is compared of the value there.
        entries: (dict, key, value) of everything that is looked up.
        sizes: (container, length).
        sequences: (list, its items).
        codes: of the functions.
        probes: (function, what it returned) of what is no dict.
        parameters: all parameters of the model, each once.
        caches: functions that keep what they returned.
        owners: place of a number → what has it, and its key, index or attribute there.
    """

    def __init__(self, names: frozenset[str], starts: frozenset[str]) -> None:
        self._known, self._known_starts = names, tuple(starts)
        self.names: set[str] = set(names)
        self.starts: set[str] = set(starts)
        self.values: dict[str, Hashable] = {}
        self.entries: list[tuple[dict[Any, Any], Any, Any]] = []
        self.places: list[str] = []
        self.sequence_places: list[str] = []
        self.sizes: list[tuple[Any, int]] = []
        self.sequences: list[tuple[Any, list[Any]]] = []
        self.probes: list[tuple[Callable[[], Any], Any]] = []
        self.parameters: list[nn.Parameter] = []
        self.codes: list[types.CodeType] = []
        self.caches: list[Any] = []
        self.owners: dict[str, tuple[Any, Any]] = {}
        self._seen: dict[int, Any] = {}
        self._names_of: dict[int, str] = {}

    @classmethod
    def of(cls, model: nn.Module, step: Any) -> "Reached":
        """What a step reaches on a model."""
        names, starts = frozenset[str](), frozenset[str]()
        while True:
            found = cls(names, starts)
            tensors = [*model.named_parameters(), *model.named_buffers()]
            found._names_of = {id(tensor): name for name, tensor in tensors}
            found._visit("the step", step, 0)
            found._visit("model", model, 0)
            found.parameters = list(model.parameters())
            if found.names == names and found.starts == starts:
                return found
            names, starts = frozenset(found.names), frozenset(found.starts)

    def line_of(self, place: str) -> str:
        """The line of the user's, or else of a library's, that names the last part of a place."""
        name = place.replace("]", "").replace("[", ".").rpartition(".")[2].split(" ")[0].strip("'\"")
        wanted = [name, *reversed(place.replace("[", ".").split(".")[:-1])]
        for word in wanted:
            for code in sorted(self.codes, key=lambda code: not is_users_own(code.co_filename)):
                line = line_in(code, word.strip("'\""))
                if line is not None:
                    return f"{code.co_filename}:{line}"
        first = next(iter(self.codes), None)
        return "the step" if first is None else f"{first.co_filename}:{first.co_firstlineno}"

    def place_of(self, tensor: Tensor) -> str:
        """Where a tensor, or one that shares its memory, was reached; "" where none was."""
        where = tensor.untyped_storage().data_ptr()
        alike = {
            self._identity(value) for value in self._seen.values()
            if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() == where
        }  # fmt: skip
        return next((p for p, v in self.values.items() if isinstance(v, tuple) and v[1] in alike), "")

    def files(self) -> Iterator[tuple[str, Any]]:
        """Regular files that are open to be written, with their places; not the standard streams."""
        places = {key[1]: place for place, key in self.values.items() if isinstance(key, tuple) and len(key) == 2}
        for value in self._seen.values():
            if isinstance(value, io.IOBase) and not value.closed and value.writable() and value.seekable():
                with suppress(OSError):  # one in memory has no number
                    if stat.S_ISREG(os.fstat(value.fileno()).st_mode):
                        yield places.get(id(value), ""), value

    def named_entries(self) -> Iterator[tuple[str, tuple[dict[Any, Any], Any, Any]]]:
        """The entries with their places."""
        return zip(self.places, self.entries, strict=True)

    def named_sequences(self) -> Iterator[tuple[str, tuple[Any, list[Any]]]]:
        """The lists with their places."""
        return zip(self.sequence_places, self.sequences, strict=True)

    def number(self, place: str) -> Any:
        """The number that is at a place of ``owners`` now; NaN where there is none any more."""
        holder, key = self.owners[place]
        try:
            if isinstance(holder, types.CellType):
                now = holder.cell_contents
            else:
                now = holder[key] if isinstance(holder, dict | list | deque) else getattr(holder, key)
        except (LookupError, AttributeError, ValueError):
            return math.nan
        return now if _is_number(now) else math.nan

    def assign(self, place: str, number: Any) -> None:
        """Put a number there."""
        holder, key = self.owners[place]
        if isinstance(holder, types.CellType):
            holder.cell_contents = number
        elif isinstance(holder, dict | list | deque):
            holder[key] = number
        else:
            setattr(holder, key, number)

    def _identity(self, tensor: Tensor) -> Hashable:
        """What a tensor is compared by: those of the model by their names, wherever else they are kept.

        Recurrent layers keep theirs in a list, too. A parameter that another rank holds is replaced under its name.
        """
        return self._names_of.get(id(tensor), id(tensor))

    def _named(self, name: Any) -> bool:
        return name in self._known or (bool(self._known_starts) and name.startswith(self._known_starts))

    def _visit(  # noqa: PLR0912 - a case a kind of value
        self, place: str, value: Any, depth: int, owner: tuple[Any, Any] | None = None
    ) -> None:
        if is_leaf(value):
            self.values[place] = leaf_key(value)
            if owner is not None and _is_number(value):
                self.owners[place] = owner
            return
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(value)] = value  # alive, so that no other object gets its identity
        if isinstance(value, Tensor):
            self.values[place] = "a tensor", self._identity(value)
        elif isinstance(value, nn.Module):
            self._module(place, value, depth)
        elif isinstance(value, types.FunctionType):
            self._function(place, value, depth)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.caches.append(value)
            self._visit(place, value.__wrapped__, depth + 1)
        elif isinstance(value, types.MethodType):
            self._visit(place, value.__func__, depth + 1)
            self._visit(place, value.__self__, depth + 1)
        elif isinstance(value, functools.partial):
            self._visit(place, value.func, depth + 1)
            self._visit(f"{place}'s arguments", value.args, depth + 1)
            self._container(f"{place}'s arguments", value.keywords, depth)
        elif isinstance(value, type):
            self.values[place] = "a class", value.__qualname__
            self._class(value.__name__, value, depth)
        elif isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None)
            if value.__name__ == "__main__" or (file is not None and is_users_own(file)):
                self._attributes(value.__name__, value.__dict__, depth)
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            self._container(place, value, depth)
        elif isinstance(value, numpy.ndarray | bytearray | array):
            self._bytes(place, value)
        else:
            self._object(place, value, depth)

    def _object(self, place: str, value: Any, depth: int) -> None:
        kind = type(value)
        origin = _origin_of_class(kind)  # type: ignore[arg-type]
        self.values[place] = "an object", f"{kind.__module__}.{kind.__qualname__}"
        if origin is Origin.INTERNAL and not isinstance(value, types.SimpleNamespace | Namespace):
            self.values[place] = f"{kind.__module__}.{kind.__qualname__}", id(value)
            return
        self._class(kind.__name__, kind, depth)
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._attributes(place, own, depth)
        for name in [n for base in kind.__mro__ for n in _slots(base) if self._named(n)]:
            descriptor = getattr(kind, name, None)
            if isinstance(descriptor, types.MemberDescriptorType):
                probe = functools.partial(getattr, value, name, None)
                self.probes.append((probe, found := probe()))
                self._visit(f"{place}.{name}", found, depth + 1, (value, name))

    def _attributes(self, place: str, own: dict[str, Any], depth: int) -> None:
        self.sizes.append((own, len(own)))
        self._entries(place, own, [name for name in own if self._named(name) and name not in _SPECIAL], depth)

    def _entries(self, place: str, own: dict[str, Any], names: list[str], depth: int) -> None:
        for name in names:
            self._entry(f"{place}.{name}", own, name)
            self._visit(f"{place}.{name}", own[name], depth + 1, (own, name))

    def _entry(self, place: str, holder: dict[Any, Any], name: Any) -> None:
        self.entries.append((holder, name, holder[name]))
        self.places.append(place)

    def _container(self, place: str, value: Any, depth: int) -> None:
        self.values[f"len({place})"] = type(value).__name__, len(value)
        many = len(value) > _MANY
        if many and not isinstance(value, set | frozenset) and (len(value) > _MOST or all(map(is_leaf, _items(value)))):
            self.values[place] = type(value).__name__, _digest_of_items(value)
            if not isinstance(value, tuple):
                self.probes.append((functools.partial(_digest_of_items, value), self.values[place][1]))  # type: ignore[index]
        elif isinstance(value, dict):
            self.sizes.append((value, len(value)))
            for key, item in value.items():
                there = f"{place}[{key!r}]" if is_leaf(key) else f"{place}[…]"
                self._entry(there, value, key)
                self._visit(there, item, depth + 1, (value, key))
        elif isinstance(value, set | frozenset):
            self.values[place] = type(value).__name__, frozenset(leaf_key(v) if is_leaf(v) else id(v) for v in value)
            self.probes.append((functools.partial(frozenset, value), frozenset(value)))
        else:
            if not isinstance(value, tuple):
                self.sequences.append((value, list(value)))
                self.sequence_places.append(place)
            for i, item in enumerate(value):
                self._visit(f"{place}[{i}]", item, depth + 1, None if isinstance(value, tuple) else (value, i))

    def _bytes(self, place: str, value: Any) -> None:
        """An array, compared by a digest of its values where these can change."""
        self.values[place] = type(value).__name__, _digest(value)
        if not isinstance(value, numpy.ndarray) or value.flags.writeable:
            self.probes.append((functools.partial(_digest, value), self.values[place][1]))  # type: ignore[index]

    def _module(self, place: str, module: nn.Module, depth: int) -> None:
        self.values[place] = "a module", f"{type(module).__module__}.{type(module).__qualname__}"
        if isinstance(module, torch.jit.ScriptModule):
            return  # its attributes are no Python values
        own: dict[str, Any] = module.__dict__
        self._class(type(module).__name__, type(module), depth)
        self._attributes(place, own, depth)
        if "forward" in own and "forward" not in self._known:
            self._entries(place, own, ["forward"], depth)
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            self.sizes.append((own[hooks], len(own[hooks])))
            for number, hook in own[hooks].items():
                self._entry(f"{place}.{hooks}", own[hooks], number)
                self._visit(f"{place}'s hook {len(self.entries)}", hook, depth + 1)
        for held in (module._parameters, module._buffers):
            self.sizes.append((held, len(held)))
            for name, tensor in held.items():
                self._entry(f"{place}.{name}", held, name)
                what = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
                trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
                self.values[f"{place}.{name}"] = what
                if isinstance(tensor, nn.Parameter):
                    self.values[f"{place}.{name}.requires_grad"] = "bool", trained
        self.sizes.append((module._modules, len(module._modules)))
        for name, child in module._modules.items():
            self._entry(f"{place}.{name}", module._modules, name)
            if child is not None:
                self._visit(f"{place}.{name}", child, depth + 1)

    def _class(self, place: str, kind: type, depth: int) -> None:
        for base in kind.__mro__:
            origin = _origin_of_class(base)
            if origin is Origin.INTERNAL or id(base) in self._seen:
                continue
            self._seen[id(base)] = base
            for name, value in list(vars(base).items()):
                run = name == "forward" or (name.startswith("__") and name.endswith("__") and name not in _NOT_RUN)
                if not run and not self._named(name):
                    continue
                function = _function_in(value)
                if function is not None:
                    self._visit(f"{base.__name__}.{name}", function, depth + 1)
                elif name.startswith("__") or isinstance(
                    value, types.MemberDescriptorType | types.GetSetDescriptorType
                ):
                    continue
                else:
                    self._visit(f"{base.__name__}.{name}", value, depth + 1, (base, name))
                if origin is Origin.USER:
                    self.probes.append((functools.partial(vars(base).get, name), value))

    def _function(self, place: str, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        origin = origin_of(code.co_filename)
        self.values[place] = "a function", code
        if origin is not Origin.INTERNAL:
            self.codes.append(code)
            self.names |= _names(code, origin is Origin.USER)
            self.starts |= _starts(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            held = _content(cell)
            # A decorator of a library's, around the user's function.
            if origin is not Origin.INTERNAL or isinstance(held, _FUNCTIONS):
                self.probes.append((functools.partial(_content, cell), held))
                self._visit(name, held, depth + 1, (cell, name))
        if origin is Origin.INTERNAL:
            return
        for default in (function.__defaults__, function.__kwdefaults__):
            self._visit(f"a default of {function.__qualname__}", default, depth + 1)
        if origin is Origin.USER:
            self.probes.append((functools.partial(getattr, function, "__defaults__"), function.__defaults__))
            self._visit_environment(code)
        if function.__dict__:
            self._attributes(function.__qualname__, function.__dict__, depth)
        variables = function.__globals__
        for name in _names(code, False):
            if name not in variables:
                if origin is Origin.USER and name in sys.modules:
                    self._visit(name, sys.modules[name], depth + 1)
                continue
            held = variables[name]
            if origin is Origin.USER or isinstance(held, _FUNCTIONS):
                self._entry(name, variables, name)
                self._visit(name, held, depth + 1, (variables, name))

    def _visit_environment(self, code: types.CodeType) -> None:
        if {"environ", "getenv"}.isdisjoint(_names(code, False)):
            return
        for name in sorted(_strings(code)):
            probe = functools.partial(os.environ.get, name)
            self.values[f"os.environ[{name!r}]"] = leaf_key(probe())
            self.probes.append((probe, probe()))


def _items(container: Any) -> Iterator[Any]:
    return chain(container.keys(), container.values()) if isinstance(container, dict) else iter(container)


def _digest_of_items(container: Any) -> int:
    """32 bits over the values in a container, the same in every process; of objects their identities."""
    return crc32(repr([leaf_key(item) if is_leaf(item) else id(item) for item in _items(container)]).encode())


def _digest(value: Any) -> int:
    """32 bits over an array's values; of one that cannot be written its identity."""
    if isinstance(value, numpy.ndarray):
        if not value.flags.writeable:
            return id(value)
        value = value if value.flags.c_contiguous else numpy.ascontiguousarray(value)
        return hash(tuple(map(id, value.flat))) if value.dtype.hasobject else crc32(value.view(numpy.uint8).data)
    return crc32(memoryview(value))


def _is_number(value: Any) -> bool:
    """Whether a value is a number itself, and none that is known later and only looks like one."""
    return issubclass(type(value), int | float) and type(value) is not bool


def _strings(code: types.CodeType) -> set[str]:
    nested = (_strings(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return {c for c in code.co_consts if isinstance(c, str)}.union(*nested)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _function_in(value: Any) -> Any:
    """The function of a method, property or the like in a class."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return value if isinstance(value, types.FunctionType | functools._lru_cache_wrapper) else None


def line_in(code: types.CodeType, name: str) -> int | None:
    """The first line of a function that names an attribute or variable; None without any."""
    line = None
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions is not None else line
        if instruction.argval == name and instruction.opname.startswith(("LOAD_", "STORE_", "BINARY")):
            return line
    nested = (line_in(c, name) for c in code.co_consts if isinstance(c, types.CodeType))
    return next((found for found in nested if found is not None), None)
