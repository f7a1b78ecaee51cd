"""Files that a step opens: what it writes while it is captured, or only tried, belongs to no real step.

A file that the user's code opens to write is ``os.devnull``, ``torch.save`` does nothing, and a file that was open
before gets its length again.
"""

import builtins
import io
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
def opened_otherwise(opens: Callable[[str, str], str | None]) -> Iterator[None]:
    """Within, files that the user's code opens are seen.

    Args:
        opens: called with the mode and the user's line; returns the path that is opened instead, or None.
    """
    original = open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and _passes_on(frame.f_code.co_filename):
            frame = frame.f_back
        other = None
        if frame is not None and is_users_own(frame.f_code.co_filename):
            other = opens(mode, calling_line(frame))
        return (
            original(file, mode, *args, **kwargs)
            if other is None
            else original(other, mode.replace("x", "w"), *args, **kwargs)
        )

    with mock.patch.object(builtins, "open", opened), mock.patch.object(io, "open", opened):
        yield


def _passes_on(file: str) -> bool:
    """Whether code opens files for its callers: Python's own, this, and what loads tensors and arrays."""
    return (
        file == __file__
        or (file.startswith((_STANDARD_LIBRARY, "<frozen")) and "site-packages" not in file)
        or file.endswith(_LOADERS)
    )


@contextmanager
def files_kept(reached: Reached, warns: bool) -> Iterator[None]:
    """Within, a step runs and writes no file.

    Args:
        reached: what it reaches.
        warns: whether to warn, once a line, of what it writes.
    """
    lines: dict[str, None] = {}

    def opens(mode: str, line: str) -> str | None:
        if not set(mode) & set("wax"):
            return None
        lines.setdefault(line)
        return os.devnull

    def save(*_args: Any, **_options: Any) -> None:  # torch's own writer opens a path without Python
        lines.setdefault(calling_line(sys._getframe(1)))

    with ExitStack() as stack:
        stack.enter_context(opened_otherwise(opens))
        for module in (torch, torch.serialization):
            stack.enter_context(mock.patch.object(module, "save", save))
        for place, file in reached.files():
            stack.callback(_cut_back, file, _length(file), place, lines, reached)
        yield
    for line in lines if warns else ():
        warn_at(
            line,
            "the step writes a file here: captured, Python runs once, and nothing is written; print or log in the "
            "step, or return metrics, and write files between steps (weights with pipe.save or pipe.checkpoint)",
        )


def _length(file: Any) -> int:
    file.flush()
    return os.fstat(file.fileno()).st_size


def _cut_back(file: Any, length: int, place: str, lines: dict[str, None], reached: Reached) -> None:
    if not file.closed and _length(file) > length:
        os.ftruncate(file.fileno(), length)
        file.seek(0, io.SEEK_END)
        lines.setdefault(reached.line_of(place))
