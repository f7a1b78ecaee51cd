"""What a rank prints about itself: the exception that ends it, in one line, and on a signal where it is.

``kill -USR1`` of a rank prints where every rank is, also while its main thread waits inside a call of C++.

Python runs a handler in the main thread, between two of its instructions: too late for a rank that waits. But the
interpreter writes the signal's number to the wakeup file descriptor at once; the watch's thread reads it, and prints.

A handler of the user's own, such as one that writes a checkpoint before a job ends, is left as it is.
"""

import io
import logging
import os
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Protocol
from weakref import WeakSet

from ...core.capture.values.code_origin import is_user_code
from ...core.errors import PanpipeError, WorkerError

SIGNAL = signal.SIGUSR1
_AGAIN_S = 1.0
"""Seconds in which a second signal prints nothing: the handler and the watch's thread see the same one."""


class Located(Protocol):
    """The devices of a pipeline."""

    def where(self) -> str:
        """Where they are, a line for each; called in any thread."""


class WhereOnSignal:
    """Prints, on ``SIGUSR1``, where the devices of every pipeline are. There is one in a process."""

    def __init__(self) -> None:
        self._pipelines = WeakSet[Located]()
        self._received: int | None = None
        self._printed = 0.0

    def add(self, pipeline: Located) -> None:
        """Print this pipeline's text, too, as long as it is alive."""
        self._pipelines.add(pipeline)

    def remove(self, pipeline: Located) -> None:
        """Stop printing its text."""
        self._pipelines.discard(pipeline)

    def install(self) -> None:
        """Install the handler, if this is the main thread, and no other handler is there."""
        main = threading.current_thread() is threading.main_thread()
        if self._received is not None or not main or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
            return
        self._received, written = os.pipe()
        for end in (self._received, written):
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        if before != -1:  # an event loop's
            signal.set_wakeup_fd(before)
        signal.signal(SIGNAL, lambda number, frame: self.print())

    def poll(self) -> None:
        """Print if the signal has arrived; called again and again by a thread that never waits for other ranks."""
        try:
            if self._received is not None and SIGNAL in os.read(self._received, 64):
                self.print()
        except BlockingIOError:
            return

    def print(self) -> None:
        """Print every text on standard error."""
        now = time.monotonic()
        if now - self._printed < _AGAIN_S:
            return
        self._printed = now
        texts = [pipeline.where() for pipeline in list(self._pipelines)] or ["no pipeline is open here"]
        clock = time.strftime("%Y-%m-%d %H:%M:%S")
        sys.stderr.write("".join(f"panpipe: {clock} {text}\n" for text in texts))
        sys.stderr.flush()


WHERE = WhereOnSignal()
"""The one of this process."""


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
