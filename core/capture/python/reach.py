"""Finding what a step can reach.

The walk starts at the step and the model's modules. From an object it continues to the attributes whose names occur in
reached code; from a function to its globals, the variables around it, and its defaults. More code has more names, so
the walk is repeated until there is no new name.
"""

import builtins
import functools
import os
import sys
import types
from array import array
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor, nn

from ..values.code_origin import Origin, is_users_own, origin_of
from .code_names import names_in, prefixes_in, strings_in
from .compared_values import digest_of_array, digest_of_items, is_leaf, is_number, items_of, leaf_key
from .reached import Reached
from .standard_objects import ATTRIBUTES, held_by

_FUNCTIONS = (types.FunctionType, types.MethodType, functools._lru_cache_wrapper)
_MANY, _MOST = 4096, 50_000
"""Numbers of items of a container above which its values are compared by a digest, and above which objects in it are
compared by identity alone, such as those of a data set."""
_DEEPEST = 40

_SPECIAL = {"_parameters", "_buffers", "_modules", "training", "_forward_hooks", "_forward_pre_hooks"}
_NOT_RUN = {"__init__", "__new__", "__repr__", "__str__", "__setattr__", "__delattr__", "__del__", "__reduce__",
            "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__", "__init_subclass__",
            "__subclasshook__", "__dir__", "__sizeof__", "__class_getitem__", "__hash__"}  # fmt: skip


def reach(model: nn.Module, step: Any) -> Reached:
    """What a step reaches on a model."""
    names, prefixes = frozenset[str](), frozenset[str]()
    while True:
        found = _Walk(names, prefixes)
        found.visit_all(model, step)
        if found.names == names and found.prefixes == prefixes:
            return found
        names, prefixes = frozenset(found.names), frozenset(found.prefixes)


class _Walk(Reached):
    """One walk.

    Args:
        names: of attributes that are visited.
        prefixes: of names of attributes that are visited.

    Attributes:
        names, prefixes: these, and those in the code that this walk reached.
    """

    def __init__(self, names: frozenset[str], prefixes: frozenset[str]) -> None:
        super().__init__()
        self._known, self._known_prefixes = names, tuple(prefixes)
        self._classes: dict[int, type] = {}
        self.names: set[str] = set(names)
        self.prefixes: set[str] = set(prefixes)

    def visit_all(self, model: nn.Module, step: Any) -> None:
        """Visit everything from the step and the model."""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._names_of = {id(tensor): name for name, tensor in tensors}
        self._visit("the step", step, 0)
        self._visit("model", model, 0)
        self.parameters = list(model.parameters())

    def _named(self, name: Any) -> bool:
        return name in self._known or (bool(self._known_prefixes) and name.startswith(self._known_prefixes))

    def _visit(  # noqa: PLR0912 - one case for each kind of value
        self, place: str, value: Any, depth: int, owner: tuple[Any, Any] | None = None
    ) -> None:
        if is_leaf(value):
            self.values[place] = leaf_key(value)
            if owner is not None and is_number(value):
                self.owners[place] = owner
            return
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(value)] = value  # kept alive, so that no other object gets its identity
        if isinstance(value, Tensor):
            self.values[place] = "a tensor", self._identity(value)
            self._entries(place, vars(value), [name for name in vars(value) if self._named(name)], depth)
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
        elif _is_bound(value):
            self.values[place] = "a method", value.__name__
            self._visit(place + "'s object", value.__self__, depth + 1)
        elif isinstance(value, functools.partial):
            self._visit(place, value.func, depth + 1)
            self._visit(f"{place}'s arguments", value.args, depth + 1)
            self._container(f"{place}'s arguments", value.keywords, depth)
        elif isinstance(value, type):
            self.values[place] = "a class", value.__qualname__
            self._class(value.__name__, value, depth)
            self._class(type(value).__name__, type(value), depth)
        elif isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None)
            if value.__name__ == "__main__" or (is_users_own(file) if file else value.__spec__ is None):
                self._attributes(value.__name__, value.__dict__, depth)
            else:
                self._numbers(value.__name__, value.__dict__, depth)
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            self._container(place, value, depth)
        elif isinstance(value, numpy.ndarray | bytearray | array):
            self._bytes(place, value, depth)
        else:
            self._object(place, value, depth)

    def _object(self, place: str, value: Any, depth: int) -> None:
        kind = type(value)
        origin = _origin_of_class(kind)  # type: ignore[arg-type]
        self.values[place] = "an object", f"{kind.__module__}.{kind.__qualname__}"
        if origin is Origin.INTERNAL and not issubclass(kind, ATTRIBUTES):
            self.values[place] = f"{kind.__module__}.{kind.__qualname__}", id(value)
            self._held(place, value, depth)
            return
        self._held(place, value, depth)
        self._class(kind.__name__, kind, depth)
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._attributes(place, own, depth)
        for name in [n for base in kind.__mro__ for n in _slots(base) if self._named(n)]:
            descriptor = getattr(kind, name, None)
            if isinstance(descriptor, types.MemberDescriptorType):
                probe = functools.partial(getattr, value, name, None)
                self.probes.append((probe, found := probe()))
                self.variables.append((probe, functools.partial(setattr, value, name), found))
                self._visit(f"{place}.{name}", found, depth + 1, (value, name))

    def _held(self, place: str, value: Any, depth: int) -> None:
        held = held_by(value)
        if held is not None:
            self.probes.append((held.read, found := held.read()))
            owner = None if held.attribute is None else (value, held.attribute)
            self._visit(f"{place}{held.name}", found, depth + 1, owner)

    def _attributes(self, place: str, own: dict[str, Any], depth: int) -> None:
        self.sizes.append((own, len(own)))
        self._entries(place, own, [name for name in own if self._named(name) and name not in _SPECIAL], depth)

    def _entries(self, place: str, own: dict[str, Any], names: list[str], depth: int) -> None:
        for name in names:
            self._entry(f"{place}.{name}", own, name)
            self._visit(f"{place}.{name}", own[name], depth + 1, (own, name))

    def _numbers(self, place: str, own: dict[str, Any], depth: int) -> None:
        """Numbers and texts that another package holds, or that the user put there."""
        self._entries(place, own, [name for name, held in own.items() if self._named(name) and is_leaf(held)], depth)

    def _entry(self, place: str, holder: dict[Any, Any], name: Any) -> None:
        self.entries.append((holder, name, holder[name]))
        self.places.append(place)

    def _container(self, place: str, value: Any, depth: int) -> None:
        self.values[f"len({place})"] = type(value).__name__, len(value)
        many = len(value) > _MANY
        if (
            many
            and not isinstance(value, set | frozenset)
            and (len(value) > _MOST or all(map(is_leaf, items_of(value))))
        ):
            self.values[place] = type(value).__name__, digest_of_items(value)
            if not isinstance(value, tuple):
                self.probes.append((functools.partial(digest_of_items, value), self.values[place][1]))  # type: ignore[index]
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

    def _bytes(self, place: str, value: Any, depth: int) -> None:
        """An array, compared by a digest of its values if these can change."""
        self.values[place] = type(value).__name__, digest_of_array(value)
        if not isinstance(value, numpy.ndarray) or value.flags.writeable:
            self.probes.append((functools.partial(digest_of_array, value), self.values[place][1]))  # type: ignore[index]
        if isinstance(value, numpy.ndarray) and value.dtype.hasobject and value.size <= _MANY:
            for i, item in enumerate(value.flat):
                self._visit(f"{place}[{i}]", item, depth + 1)

    def _module(self, place: str, module: nn.Module, depth: int) -> None:
        self.values[place] = "a module", f"{type(module).__module__}.{type(module).__qualname__}"
        if isinstance(module, torch.jit.ScriptModule):
            return  # its attributes are not Python values
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
            if id(base) in self._classes:
                continue
            self._classes[id(base)] = base
            if origin is Origin.INTERNAL:
                self._class_numbers(base, depth)
                continue
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
                    self._class_entry(base, name, value)

    def _class_numbers(self, base: type, depth: int) -> None:
        """Numbers and texts of a class of another package, or that the user put there."""
        for name, value in list(vars(base).items()):
            if is_leaf(value) and self._named(name) and not name.startswith("__"):
                self._visit(f"{base.__name__}.{name}", value, depth + 1, (base, name))
                self._class_entry(base, name, value)

    def _class_entry(self, base: type, name: str, value: Any) -> None:
        read = functools.partial(vars(base).get, name)
        self.probes.append((read, value))
        self.variables.append((read, functools.partial(setattr, base, name), value))

    def _function(self, place: str, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        origin = origin_of(code.co_filename)
        self.values[place] = "a function", code
        if origin is not Origin.INTERNAL:
            self.codes.append(code)
            self.names |= names_in(code, origin is Origin.USER)
            self.prefixes |= prefixes_in(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            held = _content(cell)
            # A library's decorator around the user's function.
            if origin is not Origin.INTERNAL or isinstance(held, _FUNCTIONS):
                self.probes.append((functools.partial(_content, cell), held))
                assign = functools.partial(setattr, cell, "cell_contents")
                self.variables.append((functools.partial(_content, cell), assign, held))
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
        self._globals(code, origin, function.__globals__, depth)

    def _globals(self, code: types.CodeType, origin: Origin, variables: dict[str, Any], depth: int) -> None:
        named = names_in(code, False)
        if origin is Origin.USER and not named.isdisjoint(("globals", "vars", "eval")):
            named |= strings_in(code)
        for name in named:
            if name not in variables:
                if origin is Origin.USER and name in sys.modules:
                    self._visit(name, sys.modules[name], depth + 1)
                elif origin is Origin.USER and is_leaf(vars(builtins).get(name, builtins)):
                    self._entries("builtins", vars(builtins), [name], depth)
                continue
            held = variables[name]
            if origin is Origin.USER or isinstance(held, _FUNCTIONS):
                self._entry(name, variables, name)
                self._visit(name, held, depth + 1, (variables, name))

    def _visit_environment(self, code: types.CodeType) -> None:
        if {"environ", "getenv"}.isdisjoint(names_in(code, False)):
            return
        for name in sorted(strings_in(code)):
            probe = functools.partial(os.environ.get, name)
            self.values[f"os.environ[{name!r}]"] = leaf_key(probe())
            self.probes.append((probe, probe()))


_origins: WeakKeyDictionary[type, Origin] = WeakKeyDictionary()


def _origin_of_class(kind: type) -> Origin:
    if kind not in _origins:
        _origins[kind] = _found_origin(kind)
    return _origins[kind]


def _found_origin(kind: type) -> Origin:
    module = sys.modules.get(kind.__module__)
    if kind.__module__ in ("builtins", "_io"):
        return Origin.INTERNAL
    file = getattr(module, "__file__", None)
    if file is not None:
        return origin_of(file)
    return Origin.USER if module is None or kind.__module__ == "__main__" else Origin.INTERNAL


def _is_bound(value: Any) -> bool:
    """Whether a value is a method of an object, written in C; a function's own object is its module or None."""
    if not isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
        return False
    return not isinstance(value.__self__, types.ModuleType | type | None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _function_in(value: Any) -> Any:
    """The function of a method or property in a class; None for other attributes."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return value if isinstance(value, types.FunctionType | functools._lru_cache_wrapper) else None
