"""The storages of tensors: their bytes, and when they are freed."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .sizes import hint


def storage_sizes(values: Iterable[Any]) -> dict[int, int]:
    """Bytes of every distinct storage among tensors, by the storage's identity. Views share their base's storage.

    With symbolic sizes they are the bytes for the example.
    """
    sizes = {}
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            sizes[storage._cdata] = hint(storage.nbytes())
    return sizes


class StorageMeter:
    """Counts the bytes of watched storages that are alive.

    It learns that a storage is freed from a finalizer of the storage, and not from the code that should free it.

    Args:
        changed: called with the bytes alive after every change, if given.

    Attributes:
        alive: bytes alive now.
        peak: the largest number of bytes alive.
    """

    def __init__(self, changed: Callable[[int], None] | None = None) -> None:
        self.alive = 0
        self.peak = 0
        self._changed = changed
        self._watched: set[int] = set()

    def watch(self, tensors: Iterable[Any], ignored: Iterable[int] | dict[int, int] = ()) -> None:
        """Count the tensors' storages, each once, until it is freed; those in ``ignored`` (by identity) are skipped."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._watched or key in ignored:
                continue
            self._watched.add(key)
            size = hint(storage.nbytes())
            weakref.finalize(storage, self._freed, key, size)
            self._add(size)

    def _freed(self, key: int, size: int) -> None:
        self._watched.discard(key)
        self._add(-size)

    def _add(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)
        if self._changed is not None:
            self._changed(self.alive)


class WatchEverything(TorchDispatchMode):
    """A dispatch mode that has a `StorageMeter` watch every result, so that its peak is a program's workspace."""

    def __init__(self, meter: StorageMeter, ignored: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter
        self._ignored = ignored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._meter.watch(pytree.tree_leaves(result), self._ignored)
        return result
