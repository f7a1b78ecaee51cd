"""The Python values that a step reads in addition to its batch: they are constants of a captured step.

Capture runs the step's Python once, so a number that it read is a constant of the captured graph, and only the branch
that it took is in the graph. Each step compares these values. `Reads` finds them without running anything::

    step, model ──▶ functions that can be called ──▶ names that their code uses          (reach.py)
                          └──▶ variables around them, globals, defaults
    objects that these reach by such names ──▶ numbers, strings, flags, containers, hooks, requires_grad

It may find values that are not used, but it finds all values that code reads by name; a change of an unused value only
costs a capture of the same program. Values in libraries' globals are ignored.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain, starmap
from operator import eq, is_
from typing import Any
from zlib import crc32

from torch import nn

from .reachable.compared_values import has_plain_items, is_leaf, leaf_key, plain_items
from .reachable.reach import reach
from .torch_settings import torch_settings

_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Reads:
    """The values that a step reads now.

    Args:
        model: the user's module.
        step: the user's function; or one that replays what was recorded of others, in ``recorded_from``.

    Attributes:
        values: place, as text → a key of the value there; two reads are equal if these are.
    """

    def __init__(self, model: nn.Module, step: Any) -> None:
        model, step = getattr(step, "recorded_from", (model, step))
        self._reached = reached = reach(model, step)
        self._torch_settings = torch_settings()
        self.values: dict[str, Hashable] = {**self._torch_settings, **reached.values}
        self.key: Hashable = tuple(self.values.items())
        found = reached.entries
        self._holders = [holder for holder, _, _ in found]
        self._names = [name for _, name, _ in found]
        self._held = [value for _, _, value in found]
        self._sized = [holder for holder, _ in reached.sizes]
        self._sizes = [size for _, size in reached.sizes]
        ordered: list[tuple[Any, list[Any]]] = [*reached.sequences, *reached.orders]
        self._sequences = [held for held, _ in ordered if has_plain_items(held)]
        kept = [items for held, items in ordered if has_plain_items(held)]
        self._lengths, self._items = list(map(len, kept)), list(chain.from_iterable(kept))
        self._others = [(held, items) for held, items in ordered if not has_plain_items(held)]
        self._probes = reached.probes
        self._parameters = reached.parameters
        self._trained = [(parameter.requires_grad, parameter.dtype) for parameter in self._parameters]

    def unchanged(self) -> bool:
        """Whether no value has changed; cheap, because every step checks it."""
        return (
            all(map(is_, map(dict.get, self._holders, self._names), self._held))
            and all(map(eq, map(len, self._sized), self._sizes))
            and [(parameter.requires_grad, parameter.dtype) for parameter in self._parameters] == self._trained
            and all(map(eq, map(len, self._sequences), self._lengths))
            and all(map(is_, chain.from_iterable(self._sequences), self._items))
            and all(_same(plain_items(held), items) for held, items in self._others)
            and all(starmap(_probed_again, self._probes))
            and torch_settings() == self._torch_settings
        )

    def first_other(self, other: "Reads") -> str | None:
        """The first place with another value in ``other``, as text."""
        return next(self.others(other), None)

    def others(self, other: "Reads") -> Iterator[str]:
        """The places with another value in ``other``."""
        for place in {**other.values, **self.values}:
            if self.values.get(place, _MISSING) != other.values.get(place, _MISSING):
                yield place

    def digest(self, places: Iterable[str]) -> int:
        """32 bits over some places and their values, the same in every process; for objects, over their kinds."""
        return crc32(repr([(place, _plain(self.values.get(place))) for place in places]).encode())

    def text(self, place: str) -> str:
        """The value at a place, as text for messages."""
        value = self.values.get(place, None)
        return str(value[1])[:60] if isinstance(value, tuple) and len(value) == 2 else str(value)[:60]

    def line(self, place: str) -> str:
        """The user's line that reads a place, or the first line of the step."""
        return self._reached.line_of(place)


def _plain(value: Hashable) -> Any:
    """The part of a key that is equal in all processes."""
    if isinstance(value, tuple) and len(value) == 2:
        return value if isinstance(value[1], _PLAIN) else value[0]
    return type(value).__name__


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _probed_again(probe: Callable[[], Any], value: Any) -> bool:
    now = probe()
    return now is value or _still(now, value)


def _still(now: Any, value: Any) -> bool:
    if now is value:
        return True
    if isinstance(now, frozenset) and isinstance(value, frozenset):
        return now == value
    if isinstance(now, tuple) and isinstance(value, tuple):  # its own comparison would compare tensors by their values
        return len(now) == len(value) and all(map(_still, now, value))
    return is_leaf(now) and is_leaf(value) and leaf_key(now) == leaf_key(value)
