"""What remains of a rank whose process has ended before others were there to see it: a small file of this user.

A rank writes it when it becomes present, again ten times a second, and removes it once all ranks have met::

    rank 0  ──present──╳ killed                    the file says when it was there last
    rank 1       └started──────── import panpipe   it was there after this process started: it is of this job, and ended

A rank of an earlier job with the same address ended before this process started: its file counts for nothing. The file
also has the number of the rank because of which its writer ends.

The files are in a folder that this user alone can use; names are hashes of the boot, the network namespace (a container
that shares the folder may have another one), the job's address and the rank.
Where there is no such folder, ends are seen by connections alone.
"""

import hashlib
import os
import stat
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from attrs import frozen

_CONTENT = struct.Struct("<di")
"""The time since the boot at which the rank was there last, in s; the rank because of which it ends, or `NOBODY`."""
NOBODY = -1
_KEPT_S = 86400.0
"""Seconds after which the files of jobs that never met are removed."""

_RANK_PROCESSES: set[int] = set()
"""Numbers of the processes that have been a rank: this one, and those that it is a fork of."""


@frozen
class LastSeen:
    """What a rank has left.

    Args:
        at_s: when it was there last, in seconds since the boot.
        because_of: the rank because of which it ends; `NOBODY` if it does not.
    """

    at_s: float
    because_of: int


class PresenceFiles:
    """The files of the ranks of one job on this host.

    Args:
        job: host and port of the job's store.
        rank: this rank.
    """

    def __init__(self, job: str, rank: int) -> None:
        self._key = f"{_text('/proc/sys/kernel/random/boot_id')}/{_network()}/{job}"
        self._folder = _folder()
        self._rank, self._own = rank, -1
        first = os.getpid() not in _RANK_PROCESSES  # a process of a pool may be a rank of several jobs
        self._since_s = _started_s() if first else time.clock_gettime(time.CLOCK_BOOTTIME)
        _RANK_PROCESSES.add(os.getpid())

    def begin(self) -> None:
        """Write the own file; one of an earlier process is replaced."""
        if self._folder < 0:
            return
        _remove_old(self._folder)
        with suppress(OSError):
            os.unlink(self._name(self._rank), dir_fd=self._folder)
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._own = os.open(self._name(self._rank), flags, 0o600, dir_fd=self._folder)
        self.write()

    def write(self, because_of: int = NOBODY) -> None:
        """Note that this rank is there now, or because of which one it ends."""
        if self._own >= 0:
            with suppress(OSError):
                os.pwrite(self._own, _CONTENT.pack(time.clock_gettime(time.CLOCK_BOOTTIME), because_of), 0)

    def of(self, rank: int) -> LastSeen | None:
        """What another rank has left since this process started, or since its previous job; None if nothing."""
        if self._folder < 0:
            return None
        try:
            file = os.open(
                self._name(rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._folder
            )
        except OSError:
            return None
        try:
            content = os.read(file, _CONTENT.size)
        except OSError:
            return None
        finally:
            os.close(file)
        if len(content) != _CONTENT.size:
            return None
        found = LastSeen(*_CONTENT.unpack(content))
        return found if found.at_s >= self._since_s else None

    def end(self) -> None:
        """Remove the own file: all ranks have met."""
        if self._own >= 0:
            with suppress(OSError):
                os.unlink(self._name(self._rank), dir_fd=self._folder)
        self.close()

    def close(self) -> None:
        """Close the descriptors; the file remains."""
        for descriptor in (self._own, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._own = self._folder = -1

    def _name(self, rank: int) -> str:
        return hashlib.sha256(f"{self._key}/{rank}".encode()).hexdigest()


def _folder() -> int:
    """A descriptor of the folder; -1 if there is none that this user alone can use."""
    path = Path(tempfile.gettempdir(), f"panpipe-{os.getuid()}")
    with suppress(OSError):
        path.mkdir(mode=0o700)
    folder = -1
    with suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(folder)
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
            return folder
    if folder >= 0:
        os.close(folder)
    return -1


def _remove_old(folder: int) -> None:
    """Remove the files of jobs of earlier days."""
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > _KEPT_S:
                    os.unlink(name, dir_fd=folder)


def _started_s() -> float:
    """When this process was started, in seconds since the boot. Fields follow the name in parentheses."""
    fields = _text("/proc/self/stat").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") if len(fields) > 19 else float("inf")


def _network() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return ""


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8").strip()
    return ""
