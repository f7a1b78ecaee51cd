"""Reading a file that the user named, up to a limit."""

import os
import stat
from io import BufferedReader
from pathlib import Path

from ..errors import RequestError
from .limits import DOCUMENT, Limits


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading; a device or a pipe may never end.

    Raises:
        RequestError: there is no such file, it may not be read, or it is not a regular file.
    """
    try:
        file = open(path, "rb", opener=_opener)  # noqa: SIM115 - the caller closes it
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL
        raise _unreadable(path, error.strerror if isinstance(error, OSError) else str(error)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _unreadable(path, "it is not a regular file")
    return file


def _unreadable(path: str | Path, reason: str | None) -> RequestError:
    return RequestError(f"cannot read '{path}': {reason}; give the path of a readable file")


def read_bytes(path: str | Path, most: int = DOCUMENT.size) -> bytes:
    """The bytes of a file.

    Raises:
        RequestError: it cannot be opened (see `open_regular`) or read, or has more than ``most`` bytes.
    """
    with open_regular(path) as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise _unreadable(path, error.strerror) from None
    if len(data) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
        raise RequestError(f"'{path}' has more than {size}, which is too much to read: give another")
    return data


def read_text(path: str | Path, limits: Limits = DOCUMENT) -> str:
    """The text of a file.

    Raises:
        RequestError: it cannot be read (see `read_bytes`), or is not UTF-8 text.
    """
    try:
        return read_bytes(path, limits.size).decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError:
        raise _unreadable(path, "not UTF-8 text") from None


def _opener(path: str, flags: int) -> int:
    # Opening a pipe that nobody writes to would wait.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def file_below(folder: Path, name: str, origin: str | Path, *, also: Path | None = None) -> Path:
    """The path of a file that another file names: it must be in that file's folder, or below it.

    Args:
        also: a further folder that a symbolic link may lead to.

    Raises:
        RequestError: the name is absolute, has ``..``, or is a symbolic link that leads out of the folder.
    """
    parts = Path(name).parts
    if not name or not name.isprintable() or os.path.isabs(name) or ".." in parts:
        raise RequestError(
            f"'{origin}' names the file {name[:200]!r}: a file that it names must be in its folder, without '..'; "
            "correct the name, or copy the file there"
        )
    path = folder / name
    try:
        found = path.resolve()
        roots = [folder.resolve(), *([] if also is None else [also.resolve()])]
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        raise RequestError(f"'{origin}' names '{name}', which is a loop of links: copy the file there") from None
    if not any(found.is_relative_to(root) for root in roots):
        raise RequestError(
            f"'{origin}' names '{name}', a link to '{found}', which is outside its folder: copy the file there"
        )
    return path
