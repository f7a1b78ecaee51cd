"""Writing a file as a whole: under a temporary name in its folder, then renamed, so that no reader sees a part of it.

The temporary name is random, and the file is created by this process alone (``O_EXCL``, ``O_NOFOLLOW``), so nobody can
direct the write elsewhere by a link. Permissions follow the umask; a file that is replaced keeps its own.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..errors import RequestError

Part = bytes | memoryview


def write_text(path: str | Path, text: str) -> None:
    """Write a text file that the user named, in UTF-8.

    Raises:
        RequestError: it cannot be written; an existing file is then unchanged.
    """
    try:
        replace_file(path, [text.encode("utf-8", "backslashreplace")])
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL
        raise unwritable(path, error) from None


def unwritable(path: str | Path, error: OSError | ValueError) -> RequestError:
    """The error for a file that cannot be written."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return RequestError(f"cannot write '{path}': {reason}; give a path that can be written")


def replace_file(path: str | Path, parts: Iterable[Part], *, durable: bool = False) -> None:
    """Write a file, replacing an existing one at once.

    A device or a pipe, such as ``/dev/stdout``, is written directly, and so is an existing file in a folder in which no
    file can be created.

    Args:
        path: of the file. A symbolic link is replaced; its target is unchanged.
        durable: whether the bytes are on the disk on return.

    Raises:
        OSError: it cannot be written; an existing file is then unchanged.
    """
    target = Path(path)
    mode = _mode(target)
    if mode is not None and (not stat.S_ISREG(mode) or _is_special(target)):
        with target.open("wb") as file:
            file.writelines(parts)
        return
    try:
        number, temporary = new_file(target.parent, target.name)
    except PermissionError:
        if mode is None or target.is_symlink():
            raise
        with open(target, "wb", opener=_no_links) as file:
            file.writelines(parts)
        return
    try:
        with os.fdopen(number, "wb") as file:
            if mode is not None and not target.is_symlink():
                with suppress(OSError):
                    os.fchmod(number, stat.S_IMODE(mode))
            for part in parts:
                file.write(part)
            file.flush()
            if durable:
                os.fsync(number)
        os.replace(temporary, target)
        if durable:
            sync_folder(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def new_file(folder: Path, name: str) -> tuple[int, Path]:
    """Create an empty file with a random hidden name in a folder.

    Args:
        name: of the file that it becomes; the beginning of its name.

    Returns:
        The open file (a descriptor), and its path.

    Raises:
        OSError: it cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    while True:
        path = folder / f".{name[:100]}.{secrets.token_hex(8)}.part"
        with suppress(FileExistsError):
            return os.open(path, flags, 0o666), path


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk, where the file system can and the folder may be read."""
    with suppress(PermissionError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(number)


def _mode(path: Path) -> int | None:
    """The type and permissions of a file, after links; None if there is none."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _is_special(path: Path) -> bool:
    """Whether a path is an entry of /dev or /proc, such as a link to this process's standard output."""
    folder = str(path.parent.resolve())
    return folder == "/dev" or folder.startswith("/proc/")


def _no_links(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))
