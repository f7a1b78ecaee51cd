"""``kill -USR1`` of a rank prints where every rank is, also while its main thread waits inside a call of C++.

Python runs a handler in the main thread, between two of its instructions: too late for a rank that waits. But the
interpreter writes the signal's number to the wakeup file descriptor at once; the watch's thread reads it, and prints.

A handler of the user's own, such as one that writes a checkpoint before a job ends, is left as it is.
"""

import os
import signal
import sys
import threading
import time
from typing import Protocol
from weakref import WeakSet

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
