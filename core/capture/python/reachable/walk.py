"""The base of a walk over what a step can reach: which names are visited, and how attributes are recorded."""

import sys
import types
from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from ...values.code_origin import Origin, origin_of
from ..holders import INTERNAL
from ..reached import Reached
from .compared_values import is_leaf, items_of
from .known_functions import without_users_code
from .used_names import UsedNames

_SPECIAL = {*INTERNAL, "training", "_forward_hooks", "_forward_pre_hooks"}
"""Attributes of modules that `module_walk` visits itself."""


class Walk(Reached):
    """One walk.

    Args:
        used: the names in the code that earlier walks reached; attributes of these names are visited.

    Attributes:
        known: as given.
        used: these, and those in the code that this walk reached.
        classes: identity of each visited class → the class.
    """

    def __init__(self, used: UsedNames) -> None:
        super().__init__()
        self.known = used
        self.used = used
        self.classes: dict[int, type] = {}

    @abstractmethod
    def visit(self, place: str, value: Any, depth: int, owner: tuple[Any, Any] | None = None) -> None:
        """Record a value, and continue to what it holds.

        Args:
            place: of the value, as text.
            value: any.
            depth: number of objects on the way to it.
            owner: the object that holds it, and its key, index or attribute there, if it can be assigned.
        """

    def reads(self, name: Any, value: Any) -> bool:
        """Whether reached code uses a name, or computes names and the value may be one that is looked up so."""
        return name in self.known or (self.known.any_name and _is_data(value))

    def visit_attributes(self, place: str, own: dict[str, Any], depth: int) -> None:
        """Visit the attributes of an object that reached code names."""
        self.sizes.append((own, len(own)))
        read = [name for name, held in own.items() if name not in _SPECIAL and self.reads(name, held)]
        self.visit_entries(place, own, read, depth)

    def visit_entries(self, place: str, own: dict[str, Any], names: list[str], depth: int) -> None:
        """Visit some attributes."""
        for name in names:
            self.add_entry(f"{place}.{name}", own, name)
            self.visit(f"{place}.{name}", own[name], depth + 1, (own, name))

    def visit_others(self, place: str, own: dict[str, Any], depth: int) -> None:
        """Visit what another package holds under names that reached code uses: numbers, texts, containers of these,
        such as ``sys.path``, the user's functions.

        Its own functions are compared by identity, because the user may replace one.
        """
        for name in self.known.names.intersection(own):
            held = own[name]
            if is_users_function(held) or is_plain(held):
                self.visit_entries(place, own, [name], depth)
            elif isinstance(held, types.FunctionType | types.BuiltinFunctionType):
                self.add_entry(f"{place}.{name}", own, name)
                self.values[f"{place}.{name}"] = "a function", held

    def add_probe(self, read: Callable[[], Any], value: Any) -> None:
        """Record a value that is not in a dict.

        Args:
            read: reads it again.
            value: what it is now.
        """
        self.probes.append((read, value))

    def add_result(self, place: str, read: Callable[[], Any], key: Callable[[Any], Hashable]) -> None:
        """Record what a call returns, unless it fails or would run code of the user's.

        Args:
            place: of the call, as text.
            read: the call; it returns None if there is nothing to compare.
            key: the result → what is compared.
        """
        if (found := without_users_code(read)) is not None:
            self.values[place] = key(found)
            self.add_probe(read, found)

    def add_variable(self, read: Callable[[], Any], assign: Callable[[Any], Any], value: Any) -> None:
        """Record a class attribute, slot or variable of an enclosing function.

        Args:
            read: reads it again.
            assign: assigns it.
            value: what it is now.
        """
        self.add_probe(read, value)
        self.variables.append((read, assign, value))

    def add_entry(self, place: str, holder: dict[Any, Any], name: Any) -> None:
        """Record an entry of a dict."""
        self.entries.append((holder, name, dict.__getitem__(holder, name)))
        self.places.append(place)


def _is_data(value: Any) -> bool:
    """Whether a value is a number or text, a plain container, or an object of a class of the user's."""
    return is_leaf(value) or type(value) in (dict, list, tuple) or origin_of_class(type(value)) is Origin.USER


def is_users_function(value: Any) -> bool:
    """Whether a value is a function of the user's own code."""
    return isinstance(value, types.FunctionType) and origin_of(value.__code__.co_filename) is Origin.USER


_SMALL = 256
"""Number of items of a container of another package up to which these are compared."""


def is_plain(value: Any) -> bool:
    """Whether a value is a number or text, or a container of these alone."""
    return is_leaf(value) or (
        type(value) in (dict, list, set) and len(value) <= _SMALL and all(map(is_leaf, items_of(value)))
    )


_origins: WeakKeyDictionary[type, Origin] = WeakKeyDictionary()


def origin_of_class(kind: type) -> Origin:
    """The origin of the file that defines a class."""
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
