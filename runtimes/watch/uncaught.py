"""An exception that ends this process: what it is, and how it is printed."""

import sys
from types import TracebackType

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
