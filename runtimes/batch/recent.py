"""A store that keeps what was used last."""

from collections.abc import Container, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key; beyond a limit those go that were not used for longest.

    Args:
        limit: how many are kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: dict[K, V] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._values))

    def use(self, key: K) -> V | None:
        """The value of a key, which counts as used now; None where there is none."""
        if key not in self._values:
            return None
        value = self._values[key] = self._values.pop(key)
        return value

    def keep(self, key: K, value: V, needed: Container[K] = ()) -> bool:
        """Add a value.

        Args:
            key: of the value.
            value: the value.
            needed: keys that stay in any case.

        Returns:
            Whether others went for it.
        """
        self._values[key] = value
        going = [old for old in self._values if old != key and old not in needed]
        going = going[: max(len(self._values) - self.limit, 0)]
        for old in going:
            del self._values[old]
        return bool(going)

    def drop(self, key: K) -> None:
        """Let go of a value."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Let go of everything."""
        self._values.clear()
