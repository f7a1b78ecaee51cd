"""When one rank stops, all stop, within seconds, with the name of that rank and its reason.

1. A rank that fails writes its reason to the job's store before it goes, be it of an error in the user's own code; the
   first reason counts.
2. A rank that is killed is missed by those who talk to it, and they write that. Where the transport does not say whom
   it missed, as in a collective, the heartbeats tell: every rank's goes to the store twice a second.
3. A rank that does not come to a collective that all the others have come to is named by a time-out: it may wait for
   them elsewhere, and be well.
4. Every rank looks for a reason as often, from a thread: its main thread may be waiting in a transfer that nothing else
   can interrupt. Who has read it notes that, and the rank that keeps the store stays until all others have.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ...backends.gloo import lost
from ...core.errors import WorkerError, message_of
from .failure import shortened, stopped

FAILURE_KEY = "panpipe/failure"
"""Where the job's store has the reason why all stop."""
_POLL_S = 0.5
LINGER_S = 5.0
"""How long the rank that keeps the store stays, at most, when it fails, so that the others can read why."""
_SILENCE_S = 3.0
"""A rank that sends no heartbeat for so long, while another has failed, is taken for dead."""
_GRACE_S = 3.0
"""How long a rank that saw a peer's failure may take to raise it from its main thread."""
_STORE_GONE = {
    False: "rank 0 stopped: the job's store, which it keeps, is gone",
    True: "the process that started the job stopped: its store is gone",
}


def uses_agent_store() -> bool:
    """Whether ``torchrun`` keeps the job's store; rank 0 does otherwise."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def hosts_store(rank: int) -> bool:
    """Whether the job's store ends with this rank."""
    return rank == 0 and not uses_agent_store()


def failure_at_exit() -> BaseException | None:
    """The exception that ends this process, as the interpreter notes it before it calls what runs at exit."""
    return getattr(sys, "last_value", None)


def print_uncaught_in_a_line(rank: int) -> None:
    """Have a process that ends because another one did print one line: every rank would print the same stack."""
    before = sys.excepthook
    if getattr(before, "panpipe", False):
        return

    def hook(kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
        if isinstance(failure, WorkerError):
            sys.stderr.write(f"panpipe: {failure}; rank {rank} stops too\n")
        else:
            before(kind, failure, trace)

    hook.panpipe = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def acknowledge(store: Any, rank: int) -> None:
    """Note that this rank knows why all stop."""
    store.set(_told(rank), "")


def linger(store: Any, ranks: Iterable[int]) -> None:
    """Stay until these ranks know why all stop, or are silent, or it takes too long.

    A fixed second, as it was, let a rank that had no processor for that time find the store gone, and blame its keeper.
    """
    beats, deadline = _Heartbeats(store, ranks), time.monotonic() + LINGER_S
    while time.monotonic() < deadline and any(not store.check([_told(rank)]) for rank in beats.not_silent()):
        time.sleep(_POLL_S / 5)


def numbered(ranks: Sequence[int]) -> str:
    """Ranks in words: ``rank 1``, ``ranks 1, 2``."""
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def _told(rank: int) -> str:
    return f"panpipe/told/{rank}"


def _beat(rank: int) -> str:
    return f"panpipe/beat/{rank}"


class _Heartbeats:
    """The heartbeats of some ranks from now on.

    Args:
        store: the job's.
        ranks: whose.
    """

    def __init__(self, store: Any, ranks: Iterable[int]) -> None:
        self._store = store
        now = time.monotonic()
        self._last = {rank: (self._count(rank), now) for rank in ranks}
        self._first = dict(self._last)

    def _count(self, rank: int) -> int:
        return int(self._store.add(_beat(rank), 0))

    def _look(self) -> None:
        now = time.monotonic()
        for rank, (count, _) in self._last.items():
            found = self._count(rank)
            if found != count:
                self._last[rank] = found, now

    def not_silent(self) -> list[int]:
        """Those heard of within the time after which one is taken for dead, or within that time from the start."""
        self._look()
        now = time.monotonic()
        return [rank for rank, (_, heard) in self._last.items() if now - heard < _SILENCE_S]

    def silent(self) -> list[int]:
        """Those that are not heard of for that time; returns at once when all were."""
        deadline = time.monotonic() + _SILENCE_S
        while True:
            self._look()
            missing = [rank for rank, heard in self._last.items() if heard == self._first[rank]]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_S / 5)


class FailureWatch:
    """Watches the job's store for failures from a thread.

    Args:
        rank: this rank.
        size: how many there are.

    Attributes:
        reported: whether this rank has told that it stops.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        default = dist.distributed_c10d._get_default_store()
        # Connections of their own: the main thread may hold the shared one, and wait in the second.
        self._store, self._reports = (self._connection(default) for _ in range(2))
        self._stopped = threading.Event()
        self.reported = False
        self._first: str | None = None
        self._store_may_end = False
        self._thread = threading.Thread(target=self._look, name="panpipe failure watch", daemon=True)
        self._thread.start()
        atexit.register(self._leave)
        print_uncaught_in_a_line(rank)

    def _connection(self, default: Any) -> Any:
        store = default.clone() if hasattr(default, "clone") else default
        store.set_timeout(timedelta(seconds=5))
        return store

    def report(self, failure: BaseException) -> str:
        """Tell the others why this rank stops, and return why all of them do: the first reason counts.

        A rank that missed a killed one stops too, and may be gone before its other neighbours look: they miss it, and
        learn here whom it had missed.
        """
        if self._first is not None:
            return self._first
        store = self._reports
        try:
            reason = self._reason(failure)
            self.reported = True
            first: str = store.compare_set(FAILURE_KEY, "", reason).decode()
            self._first = first
            acknowledge(store, self._rank)
            if hosts_store(self._rank):
                linger(store, self._others)
        except RuntimeError:
            self.reported = True
            return _STORE_GONE[uses_agent_store()]
        return first

    @contextmanager
    def awaiting(self, group: str, ranks: Iterable[int], timeout_s: float) -> Iterator[None]:
        """In here ranks wait for each other: who does not come in time is told to all, and this rank stops.

        Args:
            group: what tells these ranks from others that meet; the store counts who came how often.
            ranks: all of them.
            timeout_s: how long, from when this one comes.
        """
        keys = {rank: f"panpipe/came/{group}/{rank}" for rank in ranks}
        meeting = self._reports.add(keys[self._rank], 1)
        timer = threading.Timer(timeout_s, self._report_absent, (keys, meeting, timeout_s))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _report_absent(self, keys: Mapping[int, str], meeting: int, timeout_s: float) -> None:
        missing = [rank for rank, key in keys.items() if self._reports.add(key, 0) < meeting]
        if missing:
            self.report(WorkerError(
                f"{numbered(missing)} did not come within {timeout_s:g} s to where rank {self._rank} waits: every rank "
                "of a pipeline takes the same batches and calls the same methods in the same order; see what it does"
            ))  # fmt: skip

    def _reason(self, failure: BaseException) -> str:
        if isinstance(failure, WorkerError):
            suspects: Sequence[int] = failure.suspects
        else:
            # A collective fails where another rank died, and does not say which.
            suspects = self._others if isinstance(failure, RuntimeError) else ()
        silent = _Heartbeats(self._reports, suspects).silent() if suspects else []
        cause = failure.__cause__ if isinstance(failure, WorkerError) and failure.__cause__ is not None else failure
        if silent:
            return shortened(f"{numbered(silent)} stopped answering: {lost(cause)}")
        if isinstance(failure, WorkerError):
            return shortened(message_of(failure))
        if isinstance(failure, RuntimeError) and lost(failure) != " ".join(message_of(failure).split()):
            return f"{numbered(self._others)} stopped answering rank {self._rank}: {lost(failure)}"
        return stopped(self._rank, failure)

    def _leave(self) -> None:
        """End a process that a failure ends, wherever it was raised: the others learn of it, and the interpreter takes
        seconds to free captured graphs, more on a busy machine than they are to wait.

        Without a failure the thread ends here. The interpreter ends daemon threads by unwinding their stacks, and where
        one is inside a call of the store, C++ aborts: ``terminate called without an active exception``.
        """
        failure = failure_at_exit()
        if failure is None:
            self.stop()
            return
        if not self.reported:
            self.report(failure)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def stop(self) -> None:
        """Stop watching; again does no harm."""
        atexit.unregister(self._leave)
        self._stopped.set()
        self._thread.join()

    def expect_end_of_store(self) -> None:
        """The rank that keeps the store has left without a failure: the store's end is none."""
        if hosts_store(0):
            self._store_may_end = True

    def _look(self) -> None:
        store = self._store
        while not self._stopped.wait(_POLL_S):
            try:
                store.add(_beat(self._rank), 1)
                if not store.check([FAILURE_KEY]):
                    continue
                reason = store.get(FAILURE_KEY).decode()
                acknowledge(store, self._rank)
                if hosts_store(self._rank):
                    linger(store, self._others)
            except RuntimeError:
                if self._stopped.is_set() or self._store_may_end:
                    return
                reason = _STORE_GONE[uses_agent_store()]
            if self._stopped.wait(_GRACE_S if self.reported else 0):
                return
            sys.stderr.write(f"panpipe: {reason}; rank {self._rank} stops too\n")
            sys.stderr.flush()
            os._exit(1)
