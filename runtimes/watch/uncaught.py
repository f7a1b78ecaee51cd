"""Finds the exception that ends this process, prints why it ends in one line, and ends it."""

import io
import logging
import os
import sys
import threading
from types import TracebackType

from ...core.capture.values.code_origin import is_user_code
from ...core.errors import PanpipeError, WorkerError

_lock = threading.Lock()
_printed = list[str]()


def failure_at_exit() -> BaseException | None:
    """The exception that ends this process; the interpreter records it before it runs exit functions."""
    return getattr(sys, "last_value", None)


def print_once(line: str) -> None:
    """Print why this process ends; its main thread and the watch's may do so at the same time, and the first one does.

    torch's hook for uncaught exceptions collects what is printed in a buffer, which is lost if another thread ends the
    process meanwhile; so this writes to the stream before it.
    """
    with _lock:
        if not _printed:
            stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ else sys.stderr
            stream.write(line + "\n")
            stream.flush()
        _printed.append(line)


def stops_too(reason: str, rank: int) -> str:
    """The line of a rank that ends because of another one."""
    return f"panpipe: {reason}; rank {rank} stops too"


def end_process() -> None:
    """End this process at once, with status 1: its main thread may wait where nothing can interrupt it, and the
    interpreter aborts at its end where another thread is inside C++."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


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
            print_once(stops_too(str(failure), rank))
        elif isinstance(failure, PanpipeError) and not os.environ.get("PANPIPE_TRACEBACK"):
            print_once(f"panpipe: rank {rank}: {users_call(trace)}{failure}")
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
