"""The memory on the host that the saved tensors of one device go to: its arena, and the copies to and from it."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...backends.streams import Streams, streams_of
from ...core.errors import warn_caller
from ..devices.available_memory import lockable_bytes
from .copies import Copies, FileArena, MemoryArena, StreamCopies, ThreadCopies
from .tier import OffloadTier


class HostMemory:
    """The arena of one device.

    Args:
        separate: whether each direction of the copies has a queue of its own.
    """

    def __init__(self, tier: OffloadTier, device: torch.device, number: int, separate: bool = False) -> None:
        self._tier, self._device, self._number, self._separate = tier, device, number, separate
        self.bytes = 0
        self._copies: Copies | None = None
        self._unpin: Callable[[], object] | None = None
        self._arena: MemoryArena | FileArena | None = None

    @property
    def copies(self) -> Copies:
        """The copies; there are some once an arena is reserved."""
        assert self._copies is not None
        return self._copies

    def reserve(self, size: int) -> None:
        """Have an arena of at least this many bytes; between steps.

        Raises:
            RequestError: there is no space for it.
        """
        if self._copies is not None and size <= self.bytes:
            return
        self.close()
        streams = streams_of(self._device)
        self._copies = self._threaded(size) if streams is None else self._streamed(size, streams)
        self.bytes = size

    def close(self) -> None:
        """Free the arena."""
        if self._copies is not None:
            self._copies.close()
        if self._arena is not None:
            self._arena.close()
        if self._unpin is not None:
            self._unpin()
        self._copies = self._unpin = self._arena = None
        self.bytes = 0

    def _threaded(self, size: int) -> Copies:
        folder = self._tier.folder
        self._arena = MemoryArena(size) if folder is None else FileArena(folder, size)
        name = f"panpipe copies of device {self._number}"
        return ThreadCopies(self._arena, name, separate=self._separate)

    def _streamed(self, size: int, streams: Streams) -> Copies:
        arena = torch.empty(size, dtype=torch.uint8)
        if self._device.type == "cuda":
            if pin(arena, self._device):
                self._unpin = finalizer = weakref.finalize(self, unpin, arena, self._device)
                finalizer.atexit = False  # the driver is gone then
            else:
                warn_caller(self._not_pinned(arena))
        return StreamCopies(arena, streams, self._device, self._number, self._separate)

    def _not_pinned(self, arena: Tensor) -> str:
        """The warning that copies use pageable memory, with the limit that may be the reason."""
        left = lockable_bytes()
        limit = "" if left is None or left >= arena.nbytes else f" (ulimit -l leaves {left} bytes)"
        return (
            f"the host pins no {arena.nbytes} bytes for the saved tensors of device {self._number}{limit}: copies use "
            "pageable memory, which is slower, and the host waits for them; raise ulimit -l, or offload less"
        )


def pin(memory: Tensor, device: torch.device) -> bool:
    """Page-lock exactly this memory, if the driver does; torch's own allocator of pinned memory rounds up to powers of
    two. ``device`` is the GPU that copies it."""
    if not memory.nbytes:
        return False
    runtime: Any = torch.cuda.cudart()
    done = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
    if not done:  # CUDA keeps the error, and the next launch of a kernel raises it: this one
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    return done


def unpin(memory: Tensor, device: torch.device) -> None:
    """Undo `pin`, when no copy uses the memory any more."""
    torch.cuda.synchronize(device)
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(memory.data_ptr())
