"""The Python values that a step reads besides its batch: a captured step keeps them, so each step compares them.

Capture runs the step's Python once. A number that it read then is a constant of the captured graph, and a branch that
it took is the only one there. `Reads` finds these values without running anything::

    step, model ──▶ functions that can be called ──▶ names that their code uses          (reached.py)
                          └──▶ variables around them, globals, defaults
    objects that these reach by such names ──▶ numbers, strings, flags, containers, hooks, requires_grad

Too much may be found, never too little where code names what it reads: a value that changes and is not used costs a
capture of the same program. Values in libraries' own globals are not looked at.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import starmap
from operator import eq, is_
from typing import Any
from zlib import crc32

from torch import nn

from .reached import Reached, is_leaf, leaf_key
from .surroundings import surroundings

_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Reads:
    """What a step reads now.

    Args:
        model: the user's module.
        step: the user's function.

    Attributes:
        values: place, in words → what is there, as far as it can be compared; two reads are alike where these are.
    """

    def __init__(self, model: nn.Module, step: Any) -> None:
        self._reached = reached = Reached.of(model, step)
        self._surroundings = surroundings()
        self.values: dict[str, Hashable] = {**self._surroundings, **reached.values}
        self.key: Hashable = tuple(self.values.items())
        found = reached.entries
        self._holders = [holder for holder, _, _ in found]
        self._names = [name for _, name, _ in found]
        self._held = [value for _, _, value in found]
        self._sized = [holder for holder, _ in reached.sizes]
        self._sizes = [size for _, size in reached.sizes]
        self._sequences = reached.sequences
        self._probes = reached.probes
        self._parameters = reached.parameters
        self._trained = [(parameter.requires_grad, parameter.dtype) for parameter in self._parameters]

    def unchanged(self) -> bool:
        """Whether everything is as it was; cheap, because every step asks."""
        return (
            all(map(is_, map(dict.get, self._holders, self._names), self._held))
            and all(map(eq, map(len, self._sized), self._sizes))
            and [(parameter.requires_grad, parameter.dtype) for parameter in self._parameters] == self._trained
            and all(len(now) == len(then) and all(map(is_, now, then)) for now, then in self._sequences)
            and all(starmap(_still, self._probes))
            and surroundings() == self._surroundings
        )

    def first_other(self, other: "Reads") -> str | None:
        """The first place where another one has another value, in words."""
        return next(self.others(other), None)

    def others(self, other: "Reads") -> Iterator[str]:
        """The places where another one has another value."""
        for place in {**other.values, **self.values}:
            if self.values.get(place, _MISSING) != other.values.get(place, _MISSING):
                yield place

    def digest(self, places: Iterable[str]) -> int:
        """32 bits over some places and the values there, the same in every process; of an object its kind counts."""
        return crc32(repr([(place, _plain(self.values.get(place))) for place in places]).encode())

    def text(self, place: str) -> str:
        """The value at a place, for people."""
        value = self.values.get(place, None)
        return str(value[1])[:60] if isinstance(value, tuple) and len(value) == 2 else str(value)[:60]

    def line(self, place: str) -> str:
        """The user's line that reads a place, or the first line of the step."""
        return self._reached.line_of(place)


def _plain(value: Hashable) -> Any:
    """What processes have in common of a value that can be compared."""
    if isinstance(value, tuple) and len(value) == 2:
        return value if isinstance(value[1], _PLAIN) else value[0]
    return type(value).__name__


def _still(probe: Callable[[], Any], value: Any) -> bool:
    now = probe()
    if now is value or (isinstance(now, frozenset) and now == value):
        return True
    return is_leaf(now) and is_leaf(value) and leaf_key(now) == leaf_key(value)
