"""A thread that never calls the network: it measures time without progress, and ends a rank if the store is silent.

If the host of the job's store dies or stops, a call of the store blocks, so the thread that calls it (`watch`) cannot
end the rank.
"""

import io
import os
import sys
import threading
import time
from collections.abc import Callable

from .activity import Activity, QuietTime
from .lost_ranks import hosts_store, store_ended, uses_agent_store
from .positions import LEFT_S, UNKNOWN, Position

_TICK_S = 0.25
_PART = 0.05
"""The processor time that counts as progress of a computation, as a part of the limit; panpipe's threads use less."""
_REPORT_S = 10.0
"""Most seconds that a rank tries to report its failure."""


class ReasonPrinter:
    """Prints why this process ends, once: its main thread and the watch's may do so at the same time."""

    def __init__(self) -> None:
        self._lock, self._printed = threading.Lock(), False

    def print(self, reason: str, rank: int) -> None:
        """Print the first reason in a line; later ones are dropped."""
        self.write(f"panpipe: {reason}; rank {rank} stops too")

    def write(self, line: str) -> None:
        """Print a line, if it is the first."""
        with self._lock:
            if not self._printed:
                # torch's hook for uncaught exceptions collects what is printed in a buffer, which is lost if another
                # thread ends the process meanwhile.
                stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ else sys.stderr
                stream.write(line + "\n")
                stream.flush()
            self._printed = True


REASON = ReasonPrinter()
"""The one of this process."""


def end_process(reason: str, rank: int) -> None:
    """Print the reason, and end this process; its main thread may wait where nothing can interrupt it."""
    REASON.print(reason, rank)
    os._exit(1)


class Watchdog:
    """Measures the progress of this process, and the answers of the store.

    Args:
        rank: this rank.
        activity: of this process.
        timeout_s: the limit on waiting.
        end: called with a reason to end this process.

    Attributes:
        timeout_s: the limit on waiting.
        quiet_s: seconds without progress.
        reporting: whether a failure is being reported now.
        host: the last known position of rank 0.
        store_has_ended: whether the store has ended, perhaps because rank 0 left.
    """

    def __init__(self, rank: int, activity: Activity, timeout_s: float, end: Callable[[str], object]) -> None:
        self._rank, self._activity, self.timeout_s, self._end = rank, activity, timeout_s, end
        self.quiet_s, self.reporting, self.store_has_ended = 0.0, False, False
        self.host: Position = UNKNOWN
        self._answers = 0
        self._tick_s = min(_TICK_S, timeout_s / 8)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="panpipe watchdog", daemon=True)
        self._thread.start()

    def answered(self) -> None:
        """Note an answer of the store."""
        self._answers += 1

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def position(self) -> Position:
        """Where this rank is."""
        activity, quiet_s = self._activity, self.quiet_s
        line = activity.line() if quiet_s >= 1 and not activity.on else ""
        return Position(activity.text(), activity.stages, activity.on, quiet_s, line)

    def _run(self) -> None:
        quiet, silent, reporting = (QuietTime(4 * self._tick_s) for _ in range(3))
        while not self._stopped.wait(self._tick_s):
            self.quiet_s = quiet.update((self._activity.count, self._activity.on, self._computed()))
            silent_s = silent.update(self._answers)
            reporting_s = reporting.update(self.reporting)
            reason = self._reason(silent_s, reporting_s)
            if reason is not None and not self._stopped.is_set():
                self._end(reason)

    def _computed(self) -> int:
        """How much processor time this process has taken, coarsely, if that is progress; otherwise 0."""
        return int(time.process_time() / (_PART * self.timeout_s)) if self._activity.computing else 0

    def _reason(self, silent_s: float, reporting_s: float) -> str | None:
        """Why this rank cannot go on; None if it can, or if the thread that calls the store decides."""
        on, quiet_s = self._activity.on, self.quiet_s
        if self.store_has_ended:
            if on and quiet_s >= (min(self.timeout_s, LEFT_S) if 0 in on else self.timeout_s):
                return self.left_by_rank_0() if self.host.left is not None else store_ended()
            return None
        if hosts_store(self._rank):
            return None
        if self.reporting and reporting_s >= min(self.timeout_s, _REPORT_S) and silent_s >= reporting_s / 2:
            return self._silent_store(silent_s)
        if on and min(quiet_s, silent_s) >= self.timeout_s:
            return self._silent_store(silent_s)
        return None

    def left_by_rank_0(self) -> str:
        """The reason for a rank that waits although rank 0 has left."""
        return (
            f"rank 0 has closed its pipeline, and rank {self._rank} is {self._activity.text()}: every rank of a "
            "pipeline must take the same batches and call the same methods in the same order"
        )

    def _silent_store(self, silent_s: float) -> str:
        fix = f"see what it does there, or raise timeout_s, which is {self.timeout_s:g} s"
        own = self.position()
        waits = f"rank {self._rank} waited {own.quiet_s:.3g} s for " + ", ".join(f"rank {rank}" for rank in own.on)
        waits = (waits if own.on else f"rank {self._rank} was") + f" {own.text}"
        if uses_agent_store():
            return (
                f"the process that started the job, with its store, gave no answer for {silent_s:.3g} s; {waits}: {fix}"
            )
        host = self.host
        line = f", line {host.line}" if host.line else ""
        last = "" if host == UNKNOWN else f" and was last seen {host.text}{line}"
        return f"{waits}; rank 0 gave no sign of life for {silent_s:.3g} s{last}: {fix}"
