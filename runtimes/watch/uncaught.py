"""Finds the exception that ends this process, and prints it in one line."""

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ...core.capture.values.code_origin import is_user_code
from ...core.errors import PanpipeError, WorkerError
from .watchdog import REASON


def failure_at_exit() -> BaseException | None:
    """The exception that ends this process; the interpreter records it before it runs exit functions."""
    return getattr(sys, "last_value", None)


def print_uncaught_in_a_line(rank: int) -> None:
    """Print one line, not a traceback, for an error of panpipe that ends this process.

    It names the line of the user's that called panpipe. With the environment variable ``PANPIPE_TRACEBACK`` the
    traceback is printed.
    """
    before = sys.excepthook
    if getattr(before, "panpipe", False):
        return

    def hook(kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
        if isinstance(failure, WorkerError):
            REASON.print(str(failure), rank)
        elif isinstance(failure, PanpipeError) and not os.environ.get("PANPIPE_TRACEBACK"):
            REASON.write(f"panpipe: rank {rank}: {users_call(trace)}{failure}")
        else:
            before(kind, failure, trace)

    hook.panpipe = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def users_call(trace: TracebackType | None) -> str:
    """The last line of the user's before the first of panpipe in a traceback, as ``file:line: ``; "" without any."""
    found = ""
    while trace is not None and is_user_code(file := trace.tb_frame.f_code.co_filename):
        found = f"{file}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return found


def keep_one_prefix(before: Callable[..., object]) -> None:
    """Remove the hook that torch adds with every process group, except the first one of this process.

    It puts the rank before each line; of several hooks each one would, and each keeps those before it.

    Args:
        before: ``sys.excepthook`` before the group was created.
    """
    added: Any = sys.excepthook
    if added is before:
        return
    if getattr(before, "prefixes", False):
        sys.excepthook = before
    else:
        added.panpipe = added.prefixes = True
