"""The arena of a device on its host: one block of bytes that the plan divides into slots.

It is allocated before the first step, and larger only before a step whose microbatches are larger than the example's.
Between steps nothing in it is of use, so that it can be replaced then.
"""

import ctypes
import errno
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import RequestError

_CHUNK = 4 << 20
"""Bytes of one call that copies. Between two calls a thread checks whether to stop, and waits to keep to a rate."""


class Arena(ABC):
    """A block of bytes that the copy thread of a device on the CPU reads and writes.

    Attributes:
        bytes: its size.
    """

    bytes: int

    @abstractmethod
    def write(self, offset: int, source: Tensor) -> None:
        """Copy bytes into the arena.

        Args:
            offset: where.
            source: contiguous bytes of the host.

        Raises:
            OSError: they cannot be written.
        """

    @abstractmethod
    def read(self, offset: int, target: Tensor) -> None:
        """Copy bytes from the arena; arguments as of `write`."""

    @abstractmethod
    def close(self) -> None:
        """Free it."""


class MemoryArena(Arena):
    """An arena in the host's memory.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.bytes = size
        self._memory = torch.empty(size, dtype=torch.uint8)

    def write(self, offset: int, source: Tensor) -> None:
        ctypes.memmove(self._memory.data_ptr() + offset, source.data_ptr(), source.nbytes)

    def read(self, offset: int, target: Tensor) -> None:
        ctypes.memmove(target.data_ptr(), self._memory.data_ptr() + offset, target.nbytes)

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


class FileArena(Arena):
    """An arena in a file that has no name: the system removes it with the process, whatever ends it.

    Its blocks are reserved when it is created, so that the disk cannot become full during a step, if the file system
    honours the reservation.

    Args:
        folder: of the file.
        size: bytes.

    Raises:
        RequestError: the folder has less space, or no file can be created there.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.bytes, self._folder = size, folder
        try:
            self._file = _unnamed_file(folder)
        except OSError as error:
            raise RequestError(
                f"offload_to: no file can be created in {folder} ({error.strerror}): name a folder that can be written"
            ) from error
        self._end = weakref.finalize(self, os.close, self._file)
        try:
            if size:
                _reserve(self._file, size)
        except OSError as error:
            self.close()
            raise RequestError(
                f"offload_to: the saved tensors of a device take {size} bytes in {folder}, and the file cannot be that "
                f"large ({error.strerror}; {_free_bytes(folder)} bytes are free): name a folder with more space, or "
                "offload less"
            ) from error

    def write(self, offset: int, source: Tensor) -> None:
        left = memoryview(source.numpy().data)
        with self._naming_folder():
            while left:
                done = os.pwritev(self._file, [left], offset)
                left, offset = left[done:], offset + done

    def read(self, offset: int, target: Tensor) -> None:
        left = memoryview(target.numpy().data)
        with self._naming_folder():
            while left:
                done = os.preadv(self._file, [left], offset)
                if not done:
                    raise OSError(errno.EIO, f"the file ends before byte {offset}")
                left, offset = left[done:], offset + done

    def close(self) -> None:
        self._end()

    @contextmanager
    def _naming_folder(self) -> Iterator[None]:
        """Add the folder to an error of the system, because the file has no name."""
        try:
            yield
        except OSError as error:
            error.filename = f"file of saved tensors in {self._folder}"
            raise


def _unnamed_file(folder: Path) -> int:
    """A new file without a name, open for reading and writing."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):  # file systems that cannot
                raise
    file, name = tempfile.mkstemp(prefix="panpipe-offload-", dir=folder)
    os.unlink(name)
    return file


def _reserve(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def chunks(size: int) -> list[tuple[int, int]]:
    """Offset and length of each part that one call copies."""
    return [(start, min(_CHUNK, size - start)) for start in range(0, size, _CHUNK)]
