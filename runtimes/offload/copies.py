"""The copies of a device: out to the arena and back, in order, next to compute.

    OFFLOAD   1 the copy waits for what computed the storages
              2 `wait`: compute waits for the copy; then the storages are freed
    RELOAD    3 the new storages are allocated by the compute queue
              4 the copy waits for its own OFFLOAD, and for what used their memory before
              5 `wait`: compute waits for the copy; then views of them take the places of the saved tensors

A slot of the arena is used again only by an OFFLOAD that compute issues after 5. A device on the CPU has a thread that
copies (`ThreadCopies`); one with streams has a copy stream (`StreamCopies`), and no thread of the host waits.

The arena is one block of bytes on the host that the plan divides into slots. It is allocated before the first step, and
larger only before a step whose microbatches are larger than the example's: between steps nothing in it is of use.
"""

import ctypes
import errno
import os
import queue
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from attrs import define, field
from torch import Tensor

from ...backends.streams import Streams
from ...core.errors import OffloadError, RequestError, in_a_line

_CHUNK = 4 << 20
"""Bytes of one call that copies. Between two calls a thread checks whether to stop."""


Then = Callable[[], None]


def nothing() -> None:
    """What follows a copy whose storages stay."""


class MemoryArena:
    """A block of bytes in the host's memory, which the copy thread of a device on the CPU reads and writes."""

    def __init__(self, size: int) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8)

    def write(self, offset: int, source: Tensor) -> None:
        """Copy contiguous bytes of the host into the arena."""
        ctypes.memmove(self._memory.data_ptr() + offset, source.data_ptr(), source.nbytes)

    def read(self, offset: int, target: Tensor) -> None:
        """Copy bytes from the arena."""
        ctypes.memmove(target.data_ptr(), self._memory.data_ptr() + offset, target.nbytes)

    def close(self) -> None:
        """Free it."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class FileArena:
    """As `MemoryArena`, in a file that has no name: the system removes it with the process, whatever ends it.

    Its blocks are reserved when it is created, so that the disk cannot become full during a step, if the file system
    honours the reservation.

    Raises:
        RequestError: the folder has less space, or no file can be created there.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        try:
            file = tempfile.TemporaryFile("wb+", buffering=0, dir=folder)  # noqa: SIM115 - closed with this object
        except OSError as error:
            raise RequestError(
                f"offload_to: no file can be created in {folder} ({error.strerror}): name a folder that can be written"
            ) from error
        self._file, self._end = file.fileno(), weakref.finalize(self, file.close)
        try:
            if size:
                _reserve(self._file, size)
        except OSError as error:
            self.close()
            free = shutil.disk_usage(folder).free
            raise RequestError(
                f"offload_to: the saved tensors of a device take {size} bytes in {folder}, and the file cannot be that "
                f"large ({error.strerror}; {free} bytes are free): name a folder with more space, or "
                "offload less"
            ) from error

    def write(self, offset: int, source: Tensor) -> None:
        """As of `MemoryArena`; raises OSError if they cannot be written."""
        self._all(os.pwritev, offset, source)

    def read(self, offset: int, target: Tensor) -> None:
        """As of `MemoryArena`."""
        self._all(os.preadv, offset, target)

    def _all(self, move: Callable[[int, Sequence[memoryview], int], int], offset: int, data: Tensor) -> None:
        left = memoryview(data.numpy().data)
        try:
            while left:
                done = move(self._file, [left], offset)
                if not done:
                    raise OSError(errno.EIO, f"the file ends before byte {offset}")
                left, offset = left[done:], offset + done
        except OSError as error:
            error.filename = f"file of saved tensors in {self._folder}"  # the file has no name
            raise

    def close(self) -> None:
        """Free it."""
        self._end()


def _reserve(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


class Part(NamedTuple):
    """A storage and its slot.

    Args:
        data: the storage's bytes, on the device.
        offset: of the slot in the arena.
    """

    data: Tensor
    offset: int


@define(eq=False)
class ThreadCopy:
    """A copy that a thread runs.

    Args:
        then: called when compute has waited for it.
        own: the copy that brought the bytes to the arena, if this one brings them back.

    Attributes:
        started_ns, ended_ns: on the clock of the compute queue, once it has ended.
    """

    parts: Sequence[Part]
    then: Then
    own: "ThreadCopy | None" = None
    outward: bool = True
    done: threading.Event = field(factory=threading.Event)
    failure: BaseException | None = None
    started_ns: int = 0
    ended_ns: int = 0

    def wait(self) -> None:
        """Make what compute does from now on wait for the copy.

        Raises:
            OffloadError: the copy failed.
        """
        self.finish()
        self.then()

    def finish(self) -> None:
        """Wait for the copy alone; errors as of `wait`."""
        self.done.wait()
        if self.failure is not None:
            raise OffloadError(
                f"{'offload' if self.outward else 'reload'} of saved tensors failed: {in_a_line(self.failure)}: give "
                "offload_to more space, or offload less"
            ) from self.failure


_Jobs = queue.SimpleQueue[ThreadCopy | None]


class ThreadCopies:
    """Copies of a device on the CPU: a thread for both directions, or one for each. It runs them in the order of issue.

    The threads end with `close`, or when nothing refers to this object any more.

    Args:
        separate: whether each direction has a thread of its own.
    """

    def __init__(
        self,
        arena: MemoryArena | FileArena,
        name: str = "panpipe copies",
        separate: bool = False,
    ) -> None:
        queues: list[_Jobs] = [queue.SimpleQueue() for _ in range(1 + separate)]
        closed = threading.Event()
        self._out, self._back = queues[0], queues[-1]
        # The threads do not refer to this object, or it would live as long as they do.
        self._threads = [
            threading.Thread(target=_work, args=(jobs, arena, closed), name=name, daemon=True) for jobs in queues
        ]
        self._end = weakref.finalize(self, _end, queues, closed)
        for thread in self._threads:
            thread.start()

    def out(self, parts: Sequence[Part], then: Then = nothing) -> ThreadCopy:
        """Issue a copy from the device into the arena; ``then`` is called when compute has waited for it."""
        copy = ThreadCopy(parts, then)
        self._out.put(copy)
        return copy

    def back(self, parts: Sequence[Part], own: "Copy", then: Then = nothing) -> ThreadCopy:
        """Issue a copy from the arena to the device, after the one that brought the bytes there."""
        assert isinstance(own, ThreadCopy)
        copy = ThreadCopy(parts, then, own, outward=False)
        self._back.put(copy)
        return copy

    def close(self) -> None:
        """End the threads. Copies that were issued may be dropped."""
        self._end()
        for thread in self._threads:
            thread.join()


def _end(queues: Sequence[_Jobs], closed: threading.Event) -> None:
    closed.set()
    for jobs in queues:
        jobs.put(None)


def _work(jobs: _Jobs, arena: MemoryArena | FileArena, closed: threading.Event) -> None:
    """What a thread does: the copies of its queue, until there is None."""
    while True:
        copy = jobs.get()
        if copy is None:
            return
        try:
            if copy.own is not None:
                copy.own.finish()
            copy.started_ns = time.perf_counter_ns()
            _move(copy, arena, closed)
        except BaseException as failure:  # the compute thread raises it
            copy.failure = failure
        copy.ended_ns = time.perf_counter_ns()
        copy.parts, copy.own = (), None
        done = copy.done
        del copy  # its storages are to be freed by the one that waits, and at once
        done.set()


def _move(copy: ThreadCopy, arena: MemoryArena | FileArena, closed: threading.Event) -> None:
    move: Callable[[int, Tensor], None] = arena.write if copy.outward else arena.read
    for data, offset in copy.parts:
        for start in range(0, data.nbytes, _CHUNK):
            if closed.is_set():
                raise RuntimeError("the pipeline was closed")
            move(offset + start, data[start : start + _CHUNK])


@define(eq=False)
class StreamCopy:
    """A copy on a stream."""

    streams: Streams
    device: torch.device
    started_ns: Any
    ended_ns: Any
    then: Then

    def wait(self) -> None:
        """Make what compute does from now on wait for the copy."""
        self.streams.wait(self.streams.current(self.device), self.ended_ns)
        self.then()


class StreamCopies:
    """Copies of a device with streams, on one stream for both directions. No thread of the host waits for them.

    Not run on a GPU yet; tests prove the order with streams that record it.

    Args:
        arena: bytes of the host, pinned where that is possible.
        separate: whether each direction has a stream of its own.
    """

    def __init__(
        self, arena: Tensor, streams: Streams, device: torch.device, number: int, separate: bool = False
    ) -> None:
        self._arena, self._streams, self._device = arena, streams, device
        self._out = streams.named(("copies", number), device)
        self._back = streams.named(("copies back", number), device) if separate else self._out

    def out(self, parts: Sequence[Part], then: Then = nothing) -> StreamCopy:
        """Issue a copy from the device into the arena; ``then`` is called when compute has waited for it."""
        return self._copy(self._out, [(self._slot(part), part.data) for part in parts], then)

    def back(self, parts: Sequence[Part], own: "Copy", then: Then = nothing) -> StreamCopy:
        """Issue a copy from the arena to the device, after the one that brought the bytes there."""
        assert isinstance(own, StreamCopy)
        self._streams.wait(self._back, own.ended_ns)
        return self._copy(self._back, [(part.data, self._slot(part)) for part in parts], then)

    def close(self) -> None:
        """Streams are kept."""

    def _slot(self, part: Part) -> Tensor:
        return self._arena[part.offset : part.offset + part.data.nbytes]

    def _copy(self, stream: Any, pairs: Sequence[tuple[Tensor, Tensor]], then: Then) -> StreamCopy:
        streams = self._streams
        # The source is computed, or the target's memory is no longer used, when compute has come this far.
        streams.wait(stream, streams.record(streams.current(self._device)))
        with streams.using(stream):
            start = streams.record(stream, timed=True)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return StreamCopy(streams, self._device, start, streams.record(stream, timed=True), then)


Copy = ThreadCopy | StreamCopy
Copies = ThreadCopies | StreamCopies
