"""Python objects that operators name by number, because the arguments of an operator are tensors and plain values.

A number is valid as long as its object is held: by the captured step that gave it, the stages that are cut from it, and
their compiled programs. They are freed with the pipeline, and with them the user's modules.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

_held: ContextVar[list[object]] = ContextVar("held")


@contextmanager
def holding() -> Iterator[list[object]]:
    """A context in which objects get numbers; yields the list that holds them."""
    found: list[object] = []
    token = _held.set(found)
    try:
        yield found
    finally:
        _held.reset(token)


class NumberedObjects(Generic[T]):
    """Objects of one kind by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, value: T) -> int:
        """Give an object its number, within `holding`."""
        _held.get().append(value)
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def __getitem__(self, number: int) -> T:
        return self._objects[number]
