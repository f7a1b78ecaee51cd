"""The process of a rank: what it prints about itself, how it ends, and whether another one of its host has ended.

It prints the exception that ends it, in one line, and on a signal where it is.

``kill -USR1`` of a rank prints where every rank is, also while its main thread waits inside a call of C++.

Python runs a handler in the main thread, between two of its instructions: too late for a rank that waits. But the
interpreter writes the signal's number to the wakeup file descriptor at once; the watch's thread reads it, and prints.

A handler of the user's own, such as one that writes a checkpoint before a job ends, is left as it is.

A call of a store whose host has ended raises a ``RuntimeError``, which panpipe turns into a line. torch also logs each
such call as a warning with a C++ backtrace, on standard error. So warnings are off while ranks are watched; errors are
still logged. torch reads its log level at each message, and has no function to set it: it is a variable of its
library ``c10``.
"""

import ctypes
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch

from ...core.capture.values.code_origin import is_user_code
from ...core.errors import PanpipeError, WorkerError

SIGNAL = signal.SIGUSR1
_AGAIN_S = 1.0
"""Seconds in which a second signal prints nothing: the handler and the watch's thread see the same one."""


class WhereOnSignal:
    """Prints, on ``SIGUSR1``, where the devices of every pipeline are. There is one in a process."""

    def __init__(self) -> None:
        self._pipelines = WeakSet[Any]()
        self._received: int | None = None
        self._printed = 0.0

    def add(self, pipeline: Any) -> None:
        """Print what ``where`` of this pipeline returns, too, as long as it is alive; called in any thread."""
        self._pipelines.add(pipeline)

    def remove(self, pipeline: Any) -> None:
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


def print_stop(reason: str, rank: int) -> None:
    """Print why a rank ends because of another one."""
    print_once(f"panpipe: {reason}; rank {rank} stops too")


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
            print_stop(str(failure), rank)
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


def process_here() -> tuple[str, int]:
    """This host's boot with the namespace in which process numbers count, and the number of this process.

    The first is empty where ``/proc`` is missing, or is that of another namespace, in which numbers are others.
    """
    host = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        if os.readlink("/proc/self") == str(os.getpid()):
            host = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return host, os.getpid()


def has_ended(process: tuple[str, int], here: tuple[str, int]) -> bool:
    """Whether a process of this host has ended, in order or not; False for one of another host.

    A transport detects a killed rank at most when another rank communicates with it, and not every transport does:
    NCCL's kernels wait on the GPU for a counterpart that never comes. A slow or stopped process has not ended. The
    ranks of other hosts are ended by ``torchrun``'s agents, or named after the limit.

    Args:
        process, here: of `process_here`.
    """
    if not process[0] or process[0] != here[0]:
        return False
    try:
        state = Path(f"/proc/{process[1]}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # it is not known: this process has too many open files, or may not read another user's
        return False
    return state.split()[0] in "ZX"  # its parent has not yet read its status


_ERROR = 2
"""torch's number of the level: INFO 0, WARNING 1, ERROR 2, FATAL 3."""
_levels: list[int] = []
"""The level before each context of `without_torch_warnings` that is open, the user's first."""


@contextmanager
def without_torch_warnings() -> Iterator[None]:
    """A context in which torch logs no warning; several may overlap."""
    level = _log_level()
    _levels.append(level.value)
    level.value = max(level.value, _ERROR)
    try:
        yield
    finally:
        before = _levels.pop()
        if not _levels:
            level.value = before


def _log_level() -> ctypes.c_int:
    """The variable of torch's log level; one without effect if the user has set the level, or torch has no such one."""
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with suppress(OSError, ValueError):
            return ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_log_level")
    return ctypes.c_int()
