"""A cache of bounded size that evicts the least recently used entries."""

from collections.abc import Container, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Values by key; beyond a limit, the least recently used ones are evicted.

    Args:
        limit: the number of values that are kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: dict[K, V] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._values))

    def use(self, key: K) -> V | None:
        """The value of a key, which becomes the most recently used; None if there is none."""
        if key not in self._values:
            return None
        value = self._values[key] = self._values.pop(key)
        return value

    def keep(self, key: K, value: V, needed: Container[K] = ()) -> bool:
        """Add a value.

        Args:
            needed: keys that are not evicted.

        Returns:
            Whether other values were evicted.
        """
        self._values[key] = value
        evicted = [old for old in self._values if old != key and old not in needed]
        evicted = evicted[: max(len(self._values) - self.limit, 0)]
        for old in evicted:
            del self._values[old]
        return bool(evicted)

    def drop(self, key: K) -> None:
        """Remove a value, if it is there."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()
