"""An exception that ends this process: what it is, and how it is printed."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ...core.errors import WorkerError
from .watchdog import REASON


def failure_at_exit() -> BaseException | None:
    """The exception that ends this process; the interpreter records it before it runs exit functions."""
    return getattr(sys, "last_value", None)


def print_uncaught_in_a_line(rank: int) -> None:
    """Print one line, not a traceback, for a process that ends because of another one: all would print the same."""
    before = sys.excepthook
    if getattr(before, "panpipe", False):
        return

    def hook(kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
        if isinstance(failure, WorkerError):
            REASON.print(str(failure), rank)
        else:
            before(kind, failure, trace)

    hook.panpipe = True  # type: ignore[attr-defined]
    sys.excepthook = hook


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
