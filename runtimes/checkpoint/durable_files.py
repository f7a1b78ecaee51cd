"""Files that are written once, hashed while they are written, and synchronized to disk."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash
from attrs import frozen

from ...core.errors import RequestError
from ..watch.activity import HERE

_PIECE_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HIDDEN = ".partial-"


@frozen
class FileRecord:
    """What a file contains.

    Args:
        bytes: its size.
        xxh3_128: the XXH3 hash of its bytes, 128 bits in hexadecimal digits.
    """

    bytes: int
    xxh3_128: str


def write_durable(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and synchronize it to disk.

    Raises:
        OSError: it exists already, or cannot be written.
    """
    digest, size = xxhash.xxh3_128(), 0
    # An existing file is not opened, and no link is followed.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for piece in pieces:
            HERE.count += 1  # progress for ranks that wait
            digest.update(piece)
            size += len(piece)
            left = memoryview(piece)
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def read_record(path: Path) -> FileRecord:
    """The size and hash of an existing file.

    Raises:
        OSError: it cannot be read, or is a link or no regular file.
    """
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    size = 0
    with _regular(path) as descriptor:
        while count := os.readv(descriptor, [buffer]):
            HERE.count += 1
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The bytes of a small file.

    Raises:
        OSError: it cannot be read, has more than ``most_bytes``, or is a link or no regular file.
    """
    with _regular(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes >> 20} MiB", str(path))
    return data


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[int]:
    # Without O_NONBLOCK, opening a named pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Synchronize the entries of a folder to disk: files that were created or renamed in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system has no such operation
            raise
    finally:
        os.close(descriptor)


def hidden_folder(path: Path) -> Path:
    """Create a folder next to ``path``, to be renamed to it, with a name that cannot be predicted."""
    made = path.with_name(f"{_HIDDEN}{shortened(path.name)}-{secrets.token_hex(8)}")
    made.mkdir()  # not mkdtemp, whose folders only this user may read
    return made


def remove_folder(path: Path) -> None:
    """Remove a folder so that no reader finds a part of it: it is renamed first."""
    hidden = hidden_folder(path)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_hidden(parent: Path, chosen: Callable[[str], bool]) -> None:
    """Remove hidden folders that a killed process left.

    Args:
        parent: where they are.
        chosen: whether to remove that of a name, which may be shortened.
    """
    for found in parent.glob(f"{_HIDDEN}*"):
        if chosen(found.name.removeprefix(_HIDDEN).rpartition("-")[0]):
            shutil.rmtree(found, ignore_errors=True)


def shortened(name: str) -> str:
    """The beginning of the name of a checkpoint, as its hidden folder has it."""
    return os.fsencode(name)[:100].decode("utf-8", "ignore")


def cannot_write(path: Path, error: OSError) -> RequestError:
    """The error for a checkpoint that cannot be written, in one line."""
    if error.errno in _FULL:
        return RequestError(
            f"no space left on the disk of '{path.parent}' for the checkpoint '{path.name}': nothing of it is kept "
            "and earlier checkpoints are unchanged; free some space, or give another folder"
        )
    if error.errno == errno.EFBIG:
        return RequestError(
            f"the checkpoint '{path}' cannot be written: one of its files is larger than this process or the disk "
            "allows; earlier checkpoints are unchanged; raise the limit (ulimit -f), or give another folder"
        )
    return RequestError(
        f"the checkpoint '{path}' cannot be written: {error.strerror or error}; give a folder that every rank reads "
        "and writes"
    )
