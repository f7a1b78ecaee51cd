"""Guards: comparisons, before each step, of the Python values that the step's code names.

Capture runs the step's Python once, so a number that it read is a constant of the captured graph, and only the branch
that it took is in the graph. Numbers, texts, flags and small containers of them are compared by value and type,
modules, functions and other objects by identity; and also what training changes and torch needs: hooks,
``requires_grad`` and dtypes of parameters, torch's settings. `named_values` finds the values; nothing is called, and
nothing is patched.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter, call, is_
from typing import Any
from zlib import crc32

import numpy
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from ...errors import PanpipeError
from ..values.code_origin import is_users_own
from .named import MISSING, Named, is_plain, is_small_container, items_of
from .named_values import NamedValues
from .torch_settings import SETTINGS, torch_settings

_DIGITS = (bool, int, float, complex, str, bytes, type(None))


class Guards:
    """The values that a step's code names, as they are now.

    Args:
        model: the user's module.
        step: the user's function; or one that replays what was recorded of others, in ``recorded_from``.

    Attributes:
        values: place, as text → a key of the value there; the same is captured if these are equal.
        tensors: identity of a parameter or buffer of the model → its name.
    """

    def __init__(self, model: nn.Module, step: Any) -> None:
        model, step = getattr(step, "recorded_from", (model, step))
        self.found = NamedValues(model, step)
        self.tensors = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._settings = torch_settings()
        self.values: dict[str, Hashable] = dict(zip(SETTINGS, self._settings, strict=True))
        self._containers: list[tuple[Any, list[Any]]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        self._places: dict[str, str] = {}
        read = [n for n in self.found.named.values() if n.read_at and not n.is_set and n.value is not MISSING]
        for named in read:
            self._add(named.place, self._key(named.value), named.read_at)
        for place, module in self.found.modules.values():
            self._add_module(place, module)
        self._compare(read, [module for _, module in self.found.modules.values()])

    @property
    def key(self) -> Hashable:
        """A key of all values."""
        return tuple(self.values.items())

    def unchanged(self) -> bool:
        """Whether no value has changed; cheap, because every step checks it."""
        try:
            return self._as_before()
        except (KeyError, AttributeError, ValueError, RuntimeError, PanpipeError):
            return False  # a value is not there any more; a tensor is another one, or another rank has it now

    def others(self, other: "Guards") -> Iterator[str]:
        """The places with another value in ``other``."""
        for place in {**other.values, **self.values}:
            if self.values.get(place, MISSING) != other.values.get(place, MISSING):
                yield place

    def digest(self, places: Iterable[str]) -> int:
        """32 bits over some places and their values, the same in every process; for objects, over their kinds."""
        return crc32(repr([(place, _portable(self.values.get(place))) for place in places]).encode())

    def text(self, place: str) -> str:
        """The value at a place, as text for messages."""
        value = self.values.get(place)
        return str(value[1])[:60] if isinstance(value, tuple) and len(value) == 2 else str(value)[:60]

    def line(self, place: str) -> str:
        """The user's line that reads a place, or the first line of the step."""
        first = next(iter(self.found.codes), None)
        return self._places.get(place) or (
            "the step" if first is None else f"{first.co_filename}:{first.co_firstlineno}"
        )

    def line_of(self, name: str) -> str:
        """The user's line that reads an attribute or variable, or a library's, or the first line of the step."""
        lines = [n.read_at for n in self.found.named.values() if n.read_at and n.place.rpartition(".")[2] == name]
        own = (line for line in lines if is_users_own(line.rpartition(":")[0]))
        return next(own, "") or self.found.reading(name) or next(iter(lines), self.line(""))

    # Keys

    def _add(self, place: str, key: Hashable, line: str) -> None:
        while place in self.values:  # variables of one name in two functions
            place += "'"
        self.values[place], self._places[place] = key, line

    def _add_module(self, place: str, module: nn.Module) -> None:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            trained = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
            self.values[f"{place}.{name}"] = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            self.values[f"{place}.{name}.requires_grad"] = "bool", trained
        for name, child in module._modules.items():
            self.values[f"{place}.{name}"] = "a module", id(child)
        if "forward" in module.__dict__:
            self.values[f"{place}.forward"] = self._key(module.__dict__["forward"])
        hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
        if hooks:
            self.values[f"the hooks of {place}"] = "hooks", tuple(map(id, hooks))

    def _key(self, value: Any, depth: int = 0) -> Hashable:
        kind = type(value)
        if is_plain(value):
            if isinstance(value, slice):
                return "slice", repr(value)
            return kind.__name__, repr(value) if isinstance(value, float) and math.isnan(value) else value
        if is_small_container(value) and depth < _DEEPEST:
            items = items_of(value)
            if not isinstance(value, tuple | frozenset):
                self._containers.append((value, items))
            keys = [self._key(item, depth + 1) for item in items]
            return kind.__name__, frozenset(keys) if isinstance(value, set | frozenset) else tuple(keys)
        if issubclass(kind, numpy.ndarray) and value.nbytes <= _SMALL_ARRAY and not value.dtype.hasobject:
            self._arrays.append((value, value.tobytes()))
            return "array", (value.shape, value.dtype.str, value.tobytes())
        if issubclass(kind, Tensor):
            return "a tensor", self.tensors.get(id(value), id(value))
        code = getattr(value, "__code__", None) if callable(value) else None
        return ("a function", code) if code is not None else (f"{kind.__module__}.{kind.__qualname__}", id(value))

    # Comparisons, which are loops in C

    def _compare(self, read: Iterable[Named], modules: Sequence[nn.Module]) -> None:
        """Prepare the comparisons of values."""
        held = [one for m in modules for one in (m._modules, m._parameters, m._buffers)]
        places: list[tuple[Callable[[], Any], Any]] = [(named.getter, named.value) for named in read]
        places += [(partial(one.get, key), value) for one in held for key, value in one.items() if value is not None]
        self._getters, self._values = [getter for getter, _ in places], [value for _, value in places]
        listed = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
        children = {id(m._modules): m._modules for m in modules if m._modules or isinstance(m, listed)}
        self._sized = list((self.found.own | children).values())
        self._sizes = list(map(len, self._sized))
        self._parameters = list({id(p): p for m in modules for p in m._parameters.values() if p is not None}.values())
        self._of_parameters = list(map(_OF_PARAMETER, self._parameters))
        self._hooks: list[Any] = [held for m in modules for held in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks += [torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks]
        self._numbers_of_hooks = list(map(len, self._hooks))

    def _as_before(self) -> bool:
        return (
            self._holds_equal(list(map(call, self._getters)), self._values)
            and list(map(_OF_PARAMETER, self._parameters)) == self._of_parameters
            and list(map(len, self._sized)) == self._sizes
            and all(self._holds_equal(items_of(held), items) for held, items in self._containers)
            and all(array.tobytes() == data for array, data in self._arrays)
            and list(map(len, self._hooks)) == self._numbers_of_hooks
            and torch_settings() == self._settings
        )

    def _holds_equal(self, now: list[Any], items: list[Any]) -> bool:
        return (len(now) == len(items) and all(map(is_, now, items))) or self._replaced_by_equal(now, items)

    def _replaced_by_equal(self, now: list[Any], values: list[Any]) -> bool:
        """Whether values are equal to the earlier ones, although they are other objects; these are kept from now on."""
        if len(now) != len(values) or not all(map(self._equal, now, values)):
            return False
        values[:] = now
        return True

    def _equal(self, now: Any, value: Any) -> bool:
        return now is value or (is_plain(now) and is_plain(value) and self._key(now) == self._key(value))


_DEEPEST = 4
_SMALL_ARRAY = 1 << 14
_OF_PARAMETER = attrgetter("requires_grad", "dtype")


def _portable(key: Hashable) -> Any:
    """The part of a key that is equal in all processes."""
    if isinstance(key, tuple) and len(key) == 2:
        return (
            key if isinstance(key[1], _DIGITS) and not isinstance(key[0], tuple) and "." not in str(key[0]) else key[0]
        )
    return type(key).__name__
