"""A thread's connection to the job's store: torch logs no warnings, and nothing is called after its host has died."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from .torch_log import TORCH_LOG

T = TypeVar("T")


class JobStore:
    """One connection to the job's store.

    All methods raise a ``RuntimeError`` if the store has ended.

    Args:
        store: torch's.
        host_ended: set when the process that hosts the store is known to have died; no call then reaches torch.
    """

    def __init__(self, store: Any, host_ended: threading.Event) -> None:
        self._store, self._host_ended = store, host_ended

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key; waits for it."""
        return bytes(self._call(lambda: self._store.get(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; waits for them."""
        found: list[bytes] = self._call(lambda: self._store.multi_get(keys))
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys have values."""
        return bool(self._call(lambda: self._store.check(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key; returns the sum."""
        return int(self._call(lambda: self._store.add(key, amount)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value if the key has the expected one, or if both are absent; returns the value that it then has."""
        return bytes(self._call(lambda: self._store.compare_set(key, expected, desired)))

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key; a key without a value gets this one."""
        self._call(lambda: self._store.append(key, value))

    def remove_all(self) -> None:
        """Remove all keys with the prefix of this connection; where torch cannot list them, they remain."""
        listed = getattr(self._store, "list_keys", None)
        for key in self._call(listed) if listed is not None else ():
            self._call(partial(self._store.delete_key, key))

    def _call(self, function: Callable[[], T]) -> T:
        if self._host_ended.is_set():
            raise RuntimeError("the process that hosts the job's store has ended")
        with TORCH_LOG.without_warnings():
            return function()
