"""torch's C++ log level, raised while ranks use a job's store.

A call of a store whose host has ended raises a ``RuntimeError``, which panpipe turns into a line. torch also logs each
such call as a warning with a C++ backtrace, on standard error. So warnings are off during calls of the store, and from
the end of its host on; errors are still logged. torch reads the level at each message, and has no function to set it:
it is a variable of its library ``c10``.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_USERS_OWN = "TORCH_CPP_LOG_LEVEL"
"""A user who sets this variable gets the level that it names, including warnings."""
_ERROR = 2
"""torch's number of the level: INFO 0, WARNING 1, ERROR 2, FATAL 3."""


class TorchLog:
    """The log level of this process. Without access to it, nothing changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0
        self._level = _variable()

    @contextmanager
    def without_warnings(self) -> Iterator[None]:
        """A context in which torch logs no warning; contexts of several threads may overlap."""
        self._raise()
        try:
            yield
        finally:
            self._restore()

    def end_warnings(self) -> None:
        """Log no warning from now on."""
        self._raise()

    def _raise(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1 and self._level is not None:
                self._before = self._level.value
                self._level.value = max(self._before, _ERROR)

    def _restore(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._level is not None:
                self._level.value = self._before


def _variable() -> ctypes.c_int | None:
    """The level's variable; None if the user has set the level, or if this build of torch has no such variable."""
    if _USERS_OWN in os.environ:
        return None
    name = {"linux": "libc10.so", "darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "")
    with suppress(OSError, ValueError):
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    return None


TORCH_LOG = TorchLog()
"""The one of this process."""
