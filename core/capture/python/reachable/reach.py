"""Finding what a step can reach.

The walk starts at the step and the model's modules. From an object it continues to the attributes whose names occur in
reached code; from a function to its globals, the variables around it, and its defaults. More code has more names, so
the walk is repeated until there is no new name.
"""

import builtins
import functools
import operator
import os
import sys
import types
from array import array
from collections import deque
from typing import Any

import numpy
from torch import Tensor, nn

from ...values.code_origin import Origin, is_own, is_users_own, origin_of
from ..gradient_hooks import number_of_gradient_hooks
from ..reached import Reached
from .code_names import globals_in, names_in, strings_in
from .compared_values import (
    digest_of_array,
    digest_of_items,
    is_leaf,
    is_number,
    items_of,
    leaf_key,
    plain_class,
    plain_items,
)
from .getters import getters_called, result_of
from .known_functions import known_function, library_function
from .module_walk import visit_class, visit_module
from .standard_objects import ATTRIBUTES, held_by
from .used_names import UsedNames, names_of_getter, used_names
from .walk import Walk, is_plain, is_users_function, origin_of_class

_FUNCTIONS = (types.FunctionType, types.MethodType, functools._lru_cache_wrapper)
_MANY, _MOST = 4096, 50_000
"""Numbers of items of a container above which its values are compared by a digest, and above which objects in it are
compared by identity alone, such as those of a data set."""
_DEEPEST = 40
"""Largest number of objects on the way from the step to a value that is visited."""
_BUILTIN = (dict, list, tuple, set, frozenset, deque, numpy.ndarray, bytearray, array)
"""Classes of containers whose own objects have no attributes."""


def reach(model: nn.Module, step: Any) -> Reached:
    """What a step reaches on a model."""
    used = UsedNames()
    while True:
        found = _Walk(used)
        found.visit_all(model, step)
        if found.used == used:
            return found
        used = found.used


class _Walk(Walk):
    """One walk; see `Walk`."""

    def visit_all(self, model: nn.Module, step: Any) -> None:
        """Visit everything from the step and the model."""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.names_of = {id(tensor): name for name, tensor in tensors}
        self.visit("the step", step, 0)
        self.visit("model", model, 0)
        visit_class(self, Tensor, 0)
        size = functools.partial(len, vars(Tensor))
        self.add_probe(size, size())
        for kind in ("_global_forward_pre_hooks", "_global_forward_hooks"):
            self.visit(f"torch.nn.modules.module.{kind}", getattr(nn.modules.module, kind), 0)
        count = functools.partial(number_of_gradient_hooks, list(model.modules()), list(model.parameters()))
        self.values["hooks on gradients"] = hooks = count()
        self.add_probe(count, hooks)
        self.parameters = list(model.parameters())

    def visit(  # noqa: PLR0912 - one case for each kind of value
        self, place: str, value: Any, depth: int, owner: tuple[Any, Any] | None = None
    ) -> None:
        if is_leaf(value):
            self.values[place] = leaf_key(value)
            if owner is not None and is_number(value):
                self.owners[place] = owner
            if getattr(value, "__dict__", None) and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._instance(place, value, depth)
            return
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(value)] = value  # kept alive, so that no other object gets its identity
        if isinstance(value, Tensor):
            self.values[place] = "a tensor", self.identity(value)
            self.note_trained(place, value)
            self.visit_entries(place, vars(value), [name for name in vars(value) if name in self.known], depth)
        elif isinstance(value, nn.Module):
            visit_module(self, place, value, depth)
        elif isinstance(value, types.FunctionType):
            self._function(place, value, depth)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.caches.append(value)
            self.visit(place, value.__wrapped__, depth + 1)
        elif isinstance(value, types.MethodType):
            self.visit(place, value.__func__, depth + 1)
            self.visit(place, value.__self__, depth + 1)
        elif _is_bound(value):
            self.values[place] = "a method", value.__name__
            self.visit(place + "'s object", value.__self__, depth + 1)
        elif isinstance(value, functools.partial):
            self.visit(place, value.func, depth + 1)
            self.visit(f"{place}'s arguments", value.args, depth + 1)
            self._container(f"{place}'s arguments", value.keywords, depth)
            self._instance(place, value, depth)
        elif isinstance(value, type):
            self.values[place] = "a class", value.__qualname__
            visit_class(self, value, depth)
            visit_class(self, type(value), depth)
        elif isinstance(value, types.ModuleType):
            file, spec = value.__dict__.get("__file__"), value.__dict__.get("__spec__")
            if value.__name__ == "__main__" or (is_users_own(file) if file else spec is None):
                self.visit_attributes(value.__name__, value.__dict__, depth)
            else:
                self.visit_others(value.__name__, value.__dict__, depth)
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            self._container(place, value, depth)
            self._instance(place, value, depth)
        elif isinstance(value, numpy.ndarray | bytearray | array):
            self._bytes(place, value, depth)
            self._instance(place, value, depth)
        else:
            self._object(place, value, depth)

    def _object(self, place: str, value: Any, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, operator.attrgetter | operator.methodcaller):
            self.used |= UsedNames(names_of_getter(value))
        internal = origin_of_class(kind) is Origin.INTERNAL and not issubclass(kind, ATTRIBUTES)
        name = f"{kind.__module__}.{kind.__qualname__}"
        self.values[place] = (name, id(value)) if internal else ("an object", name)
        if internal:
            self._length(place, value)
        self._held(place, value, depth)
        self._instance(place, value, depth)

    def _instance(self, place: str, value: Any, depth: int) -> None:
        """Visit the attributes of an object, which may also be a number, a container or a function."""
        kind = type(value)
        if kind in _BUILTIN:
            return
        own = getattr(value, "__dict__", None)
        if origin_of_class(kind) is Origin.INTERNAL and not issubclass(kind, ATTRIBUTES):
            if type(own) is dict and not is_own(getattr(sys.modules.get(kind.__module__), "__file__", None) or ""):
                self.visit_entries(place, own, [name for name in own if name in self.known], depth)
            self._properties(place, value)
            return
        self.add_probe(functools.partial(type, value), kind)
        visit_class(self, kind, depth)
        if isinstance(own, dict):
            self.visit_attributes(place, own, depth)
        for name in [n for base in kind.__mro__ for n in _slots(base) if n in self.known or self.known.any_name]:
            descriptor = getattr(kind, name, None)
            if isinstance(descriptor, types.MemberDescriptorType):
                read = functools.partial(getattr, value, name, None)
                self.add_variable(read, functools.partial(setattr, value, name), found := read())
                self.visit(f"{place}.{name}", found, depth + 1, (value, name))

    def _length(self, place: str, value: Any) -> None:
        """The length of an object of another package, such as a data set."""
        self.add_result(f"len({place})", functools.partial(_length_of, value), leaf_key)

    def _properties(self, place: str, value: Any) -> None:
        """Numbers and texts that properties of an object of another package return."""
        held = [(name, item) for base in type(value).__mro__ for name, item in vars(base).items()]
        for name in [name for name, item in held if isinstance(item, property) and name in self.known.names]:
            self.add_result(f"{place}.{name}", functools.partial(_number, value, name), leaf_key)

    def _held(self, place: str, value: Any, depth: int) -> None:
        held = held_by(value)
        if held is not None:
            self.add_probe(held.read, found := held.read())
            owner = None if held.attribute is None else (value, held.attribute)
            self.visit(f"{place}{held.name}", found, depth + 1, owner)

    def _container(self, place: str, value: Any, depth: int) -> None:
        items, plain = plain_items(value), plain_class(value)
        self.values[f"len({place})"] = type(value).__name__, len(items)
        if isinstance(value, dict | set) and any(isinstance(key, Tensor) or key in self.names_of for key in items):
            self.keyed.append(value)
        if (
            len(items) > _MANY
            and not isinstance(value, set | frozenset)
            and (len(items) > _MOST or all(map(is_leaf, items_of(value))))
        ):
            digest = digest_of_items(value)
            self.values[place] = type(value).__name__, digest
            if not isinstance(value, tuple):
                self.add_probe(functools.partial(digest_of_items, value), digest)
        elif isinstance(value, dict):
            self.orders.append((value, items))
            keys = tuple(leaf_key(key) if is_leaf(key) else id(key) for key in items)
            self.values[f"the order of {place}"] = "keys", keys
            for key in items:
                there = f"{place}[{key!r}]" if is_leaf(key) else f"{place}[…]"
                self.add_entry(there, value, key)
                self.visit(there, dict.__getitem__(value, key), depth + 1, (value, key))
        elif isinstance(value, set | frozenset):
            self.values[place] = type(value).__name__, frozenset(leaf_key(v) if is_leaf(v) else id(v) for v in items)
            self.add_probe(lambda: frozenset(plain.__iter__(value)), frozenset(items))
        else:
            if not isinstance(value, tuple):
                self.sequences.append((value, items))
                self.sequence_places.append(place)
            for i, item in enumerate(items):
                self.visit(f"{place}[{i}]", item, depth + 1, None if isinstance(value, tuple) else (value, i))

    def _bytes(self, place: str, value: Any, depth: int) -> None:
        """An array, compared by a digest of its values if these can change."""
        digest = digest_of_array(value)
        self.values[place] = type(value).__name__, digest
        if not isinstance(value, numpy.ndarray) or value.flags.writeable:
            self.add_probe(functools.partial(digest_of_array, value), digest)
        if isinstance(value, numpy.ndarray) and value.dtype.hasobject and value.size <= _MANY:
            for i, item in enumerate(value.flat):
                self.visit(f"{place}[{i}]", item, depth + 1)

    def _function(self, place: str, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        origin = origin_of(code.co_filename)
        self.values[place] = "a function", code
        if origin is not Origin.INTERNAL:
            self.codes.append(code)
            self.used |= used_names(code, origin is Origin.USER)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            held = _content(cell)
            # A library's decorator around the user's function, or around several, as in functools.singledispatch.
            if origin is not Origin.INTERNAL or isinstance(held, _FUNCTIONS) or _has_functions(held):
                assign = functools.partial(setattr, cell, "cell_contents")
                self.add_variable(functools.partial(_content, cell), assign, held)
                self.visit(name, held, depth + 1, (cell, name))
        if origin is Origin.INTERNAL:
            return
        for default in (function.__defaults__, function.__kwdefaults__):
            self.visit(f"a default of {function.__qualname__}", default, depth + 1)
        if origin is Origin.USER:
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                self.add_probe(functools.partial(getattr, function, part), getattr(function, part))
            self._visit_environment(code)
            self._visit_getters(function)
        if function.__dict__:
            self.visit_attributes(function.__qualname__, function.__dict__, depth)
        self._globals(code, origin, function.__globals__, depth)

    def _globals(self, code: types.CodeType, origin: Origin, variables: dict[str, Any], depth: int) -> None:
        named = globals_in(code)
        if origin is Origin.USER and not named.isdisjoint(("globals", "vars", "eval")):
            named |= strings_in(code)
        for name in named:
            if name not in variables:
                if origin is Origin.USER and name in sys.modules:
                    self.visit(name, sys.modules[name], depth + 1)
                elif origin is Origin.USER and is_leaf(vars(builtins).get(name, builtins)):
                    self.visit_entries("builtins", vars(builtins), [name], depth)
                continue
            held = variables[name]
            if origin is Origin.USER or isinstance(held, _FUNCTIONS):
                self.add_entry(name, variables, name)
                self.visit(name, held, depth + 1, (variables, name))

    def _visit_environment(self, code: types.CodeType) -> None:
        if {"environ", "getenv"}.isdisjoint(names_in(code, False)):
            return
        for name in sorted(strings_in(code)):
            read = functools.partial(os.environ.get, name)
            self.values[f"os.environ[{name!r}]"] = leaf_key(read())
            self.add_probe(read, read())

    def _visit_getters(self, function: types.FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        variables = {**function.__globals__, **{name: _content(cell) for name, cell in cells}}
        for names in getters_called(function.__code__):
            place, getter = f"{'.'.join(names)}()", known_function(names, variables)
            if getter is None:
                self._visit_state_of(library_function(names, variables))
            elif place not in self.values:
                self.add_result(place, functools.partial(result_of, getter), lambda found: found)

    def _visit_state_of(self, function: types.FunctionType | None) -> None:
        """The global variables from which another package's function may return a state; it is not called."""
        if function is None:
            return
        variables = function.__globals__
        named = [name for name in names_in(function.__code__, False) if name in variables]
        self.visit_entries(function.__module__, variables, [name for name in named if is_plain(variables[name])], 0)


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


def _has_functions(value: Any) -> bool:
    """Whether a value is a dict of functions, some of them the user's."""
    return type(value) is dict and any(map(is_users_function, value.values()))


def _length_of(value: Any) -> int | None:
    """The length of an object; None for those without one."""
    try:
        return len(value)
    except Exception:  # the object's own
        return None


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _number(value: Any, name: str) -> Any:
    """The number or text that a property returns; None for other results."""
    try:
        found = getattr(value, name)
    except Exception:  # the object's own, such as of a property that is not ready yet
        return None
    return found if is_leaf(found) else None
