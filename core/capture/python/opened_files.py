"""Files that a step opens: nothing is written while it is captured or tried, because that is not a real step.

A file that the user's code opens for writing is replaced by ``os.devnull``, ``torch.save`` does nothing, and a file
that was open before is truncated to its earlier length.
"""

import builtins
import io
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from ..values.code_origin import is_users_own
from ..values.user_lines import calling_line, warn_at
from .reached import Reached

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LOADERS = tuple(os.path.join(*parts) for parts in (("torch", "serialization.py"), ("numpy", "lib", "_npyio_impl.py")))


@contextmanager
def opened_otherwise(opens: Callable[[str, str, bool], str | None]) -> Iterator[None]:
    """A context in which a function is called for each file that the user's code opens.

    Args:
        opens: called with the mode, the user's line, and whether Python's ``logging`` opens the file for it; returns
            the path to open instead, or None.
    """
    original = open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        logs = False
        while frame is not None and _passes_on(frame.f_code.co_filename):
            logs |= frame.f_code.co_filename == logging.__file__
            frame = frame.f_back
        other = None
        if frame is not None and is_users_own(frame.f_code.co_filename):
            other = opens(mode, calling_line(frame), logs)
        return (
            original(file, mode, *args, **kwargs)
            if other is None
            else original(other, mode.replace("x", "w"), *args, **kwargs)
        )

    with mock.patch.object(builtins, "open", opened), mock.patch.object(io, "open", opened):
        yield


def _passes_on(file: str) -> bool:
    """Whether code opens files for its callers: Python's own code, this module, and loaders of tensors and arrays."""
    return (
        file == __file__
        or (file.startswith((_STANDARD_LIBRARY, "<frozen")) and "site-packages" not in file)
        or file.endswith(_LOADERS)
    )


@contextmanager
def no_files_written(reached: Reached, warns: bool) -> Iterator[None]:
    """The context of a run of a step that writes no files.

    Args:
        reached: what the step reaches.
        warns: whether to warn, once for each line, that it writes a file.
    """
    lines: dict[str, None] = {}
    of_logs: set[str] = set()

    def opens(mode: str, line: str, logs: bool) -> str | None:
        if not set(mode) & set("wax"):
            return None
        lines.setdefault(line)
        if logs:
            of_logs.add(line)
        return os.devnull

    def save(*_args: Any, **_options: Any) -> None:  # torch's writer opens a path in C++
        lines.setdefault(calling_line(sys._getframe(1)))

    with ExitStack() as stack:
        stack.enter_context(opened_otherwise(opens))
        for module in (torch, torch.serialization):
            stack.enter_context(mock.patch.object(module, "save", save))
        for place, file in reached.files():
            stack.callback(_cut_back, file, _length(file), place, lines, reached)
        yield
    for line in lines if warns else ():
        warn_at(line, _LOG_FILE if line in of_logs else _FILE)


_FILE = (
    "the step writes a file here: a captured step's Python runs only once, and nothing is written; print or log in the "
    "step, or return metrics, and write files between steps (weights with pipe.save or pipe.checkpoint)"
)
_LOG_FILE = (
    "the step opens a log file here: a captured step's Python runs only once, and nothing is written to it; add the "
    "handler before training, and what the step logs is written for each microbatch"
)


def _length(file: Any) -> int:
    file.flush()
    return os.fstat(file.fileno()).st_size


def _cut_back(file: Any, length: int, place: str, lines: dict[str, None], reached: Reached) -> None:
    if not file.closed and _length(file) > length:
        os.ftruncate(file.fileno(), length)
        file.seek(0, io.SEEK_END)
        lines.setdefault(reached.line_of(place))
