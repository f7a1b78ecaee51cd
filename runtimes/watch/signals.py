"""``kill -USR1`` of a rank prints where every rank is, also while its main thread waits inside a call of C++.

Python runs a handler in the main thread, between two of its instructions: too late for a rank that waits. But the
interpreter writes the signal's number to the wakeup file descriptor at once; a thread reads it, and prints.

A handler of the user's own, such as one that writes a checkpoint before a job ends, is left as it is.
"""

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from weakref import WeakSet

SIGNAL = signal.SIGUSR1
_AGAIN_S = 0.2
"""Seconds in which a second signal prints nothing."""


class WhereOnSignal:
    """Prints, on ``SIGUSR1``, what every registered describer returns. There is one in a process."""

    def __init__(self) -> None:
        self._describers: WeakSet[Describer] = WeakSet()
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    def add(self, describer: "Describer") -> None:
        """Print this describer's text, too, as long as it is alive."""
        self._describers.add(describer)

    def remove(self, describer: "Describer") -> None:
        """Stop printing its text."""
        self._describers.discard(describer)

    def install(self) -> None:
        """Install the handler, if this is the main thread, and no other handler is there."""
        main = threading.current_thread() is threading.main_thread()
        if self._sockets is not None or not main or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
            return
        here, there = self._sockets = socket.socketpair()
        for end in (here, there):
            end.setblocking(False)
        before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop's
            signal.set_wakeup_fd(before)
        signal.signal(SIGNAL, self._handle)
        threading.Thread(target=self._run, args=(here,), name="panpipe signals", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Wake the thread if the interpreter did not, because something else has the wakeup file descriptor."""
        assert self._sockets is not None
        _, there = self._sockets
        now = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
        if now != there.fileno():
            signal.set_wakeup_fd(now)
            with suppress(OSError):
                there.send(bytes([number]))

    def _run(self, here: socket.socket) -> None:
        here.setblocking(True)
        printed = 0.0
        while received := here.recv(64):
            if SIGNAL in received and time.monotonic() - printed > _AGAIN_S:
                self.print()
                printed = time.monotonic()

    def print(self) -> None:
        """Print every describer's text on standard error."""
        texts = [describer() for describer in list(self._describers)] or ["no pipeline is open here"]
        clock = time.strftime("%Y-%m-%d %H:%M:%S")
        sys.stderr.write("".join(f"panpipe: {clock} {text}\n" for text in texts))
        sys.stderr.flush()


class Describer:
    """Describes where the devices of a pipeline are.

    Args:
        text: returns the text; called in a thread.
    """

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text

    def __call__(self) -> str:
        return self._text()


WHERE = WhereOnSignal()
"""The one of this process."""
