"""A connection to the job's store without torch's warnings.

A call of a store whose host has ended raises a ``RuntimeError``, which panpipe turns into a line. torch also logs each
such call as a warning with a C++ backtrace, on standard error. So warnings are off during calls of the store; errors
are still logged. torch reads its log level at each message, and has no function to set it: it is a variable of its
library ``c10``.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

_USERS_OWN = "TORCH_CPP_LOG_LEVEL"
"""A user who sets this variable gets the level that it names, including warnings."""
_ERROR = 2
"""torch's number of the level: INFO 0, WARNING 1, ERROR 2, FATAL 3."""
_ANSWER = timedelta(seconds=5)
"""Most time that a call waits for a key."""


class TorchLog:
    """The log level of this process. Without access to it, nothing changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0

    @contextmanager
    def without_warnings(self) -> Iterator[None]:
        """A context in which torch logs no warning; contexts of several threads may overlap."""
        level = _level()
        with self._lock:
            self._users += 1
            if self._users == 1 and level is not None:
                self._before, level.value = level.value, max(level.value, _ERROR)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and level is not None:
                    level.value = self._before


def _level() -> ctypes.c_int | None:
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


class JobStore:
    """A thread's own connection to the job's store, with the methods of torch's; all raise ``RuntimeError`` once the
    store has ended.

    Args:
        store: torch's.
    """

    def __init__(self, store: Any) -> None:
        with TORCH_LOG.without_warnings():
            self._store = store.clone() if hasattr(store, "clone") else store
            self._store.set_timeout(_ANSWER)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*given: Any) -> Any:
            with TORCH_LOG.without_warnings():
                return method(*given)

        return call
