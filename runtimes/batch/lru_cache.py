"""A cache of bounded size that evicts the least recently used entries."""

from collections.abc import Container
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(dict[K, V]):
    """Values by key; beyond a limit, the least recently used ones are evicted.

    Args:
        limit: the number of values that are kept.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def use(self, key: K) -> V | None:
        """The value of a key, which becomes the most recently used; None if there is none."""
        if key not in self:
            return None
        value = self[key] = self.pop(key)
        return value

    def keep(self, key: K, value: V, needed: Container[K] = ()) -> bool:
        """Add a value.

        Args:
            needed: keys that are not evicted.

        Returns:
            Whether other values were evicted.
        """
        self[key] = value
        evicted = [old for old in self if old != key and old not in needed][: max(len(self) - self.limit, 0)]
        for old in evicted:
            del self[old]
        return bool(evicted)
