"""When one rank stops, all ranks stop within seconds, with that rank's number and reason.

1. A rank that fails writes its reason to the job's store before it exits, also for an error in the user's code. The
   first reason is kept.
2. The death of a killed rank is detected by ranks that communicate with it or are connected to it, and they write the
   reason. Who is lost, and what is written, `lost_ranks` decides, from all that is seen.
3. A thread of every rank checks for a reason twice a second: its main thread may wait in a transfer that cannot be
   interrupted. A rank that has read the reason records that, and the rank that hosts the store waits until all have.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ...core.errors import WorkerError
from .lost_ranks import Heartbeats, beat, hosts_store, not_in_collective, reason_of, store_ended
from .peer_connections import PeerConnections

FAILURE_KEY = "panpipe/failure"
"""The key of the reason in the job's store."""
_POLL_S = 0.5
LINGER_S = 5.0
"""Most seconds that a failed rank that hosts the store waits, so that the others can read the reason."""
_GRACE_S = 3.0
"""Most seconds for a rank that detected a peer's failure to raise it from its main thread."""


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
            sys.stderr.write(f"panpipe: {failure}; rank {rank} stops too\n")
        else:
            before(kind, failure, trace)

    hook.panpipe = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def acknowledge(store: Any, rank: int) -> None:
    """Record that this rank has read the reason."""
    store.set(_read_key(rank), "")


def linger(store: Any, ranks: Iterable[int]) -> None:
    """Wait until these ranks have read the reason or are silent, at most `LINGER_S`.

    With a fixed wait of a second, a rank without CPU time in that second found no store, and blamed the store's host.
    """
    beats, deadline = Heartbeats(store, ranks), time.monotonic() + LINGER_S
    while time.monotonic() < deadline and any(not store.check([_read_key(rank)]) for rank in beats.not_silent()):
        time.sleep(_POLL_S / 5)


def _read_key(rank: int) -> str:
    return f"panpipe/read/{rank}"


class FailureWatch:
    """Watches the job's store for failures from a thread.

    Args:
        rank: this rank.
        size: how many there are.

    Attributes:
        reported: whether this rank has reported that it stops.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        default = dist.distributed_c10d._get_default_store()
        # Separate connections: the main thread may wait in the default one, and reports use the second one.
        self._store, self._reports = (self._connection(default) for _ in range(2))
        self._stopped = threading.Event()
        self.reported = False
        self._first: str | None = None
        self._connections: PeerConnections | None = None
        self._store_may_end, self._rank_0_ended = False, threading.Event()
        self._thread = threading.Thread(target=self._look, name="panpipe failure watch", daemon=True)
        self._thread.start()
        atexit.register(self._leave)
        print_uncaught_in_a_line(rank)

    def _connection(self, default: Any) -> Any:
        store = default.clone() if hasattr(default, "clone") else default
        store.set_timeout(timedelta(seconds=5))
        return store

    def report(self, failure: BaseException) -> str:
        """Report why this rank stops, and return the first reason, for which all stop.

        A rank that detected a dead one stops, too, and its other neighbours may then detect its end. Here they read the
        original reason.
        """
        if self._first is not None:
            return self._first
        store = self._reports
        try:
            reason = reason_of(failure, self._rank, self._others, store)
            self.reported = True
            first: str = store.compare_set(FAILURE_KEY, "", reason).decode()
            self._first = first
            acknowledge(store, self._rank)
            if hosts_store(self._rank):
                linger(store, self._others)
        except RuntimeError:
            self.reported = True
            return store_ended()
        return first

    @contextmanager
    def awaiting(self, group: str, ranks: Iterable[int], timeout_s: float) -> Iterator[None]:
        """A context for a collective; after a time-out, the absent ranks are reported to all, and this rank stops.

        Args:
            group: the name of these ranks' group; the store counts each rank's collectives in it.
            ranks: all of them.
            timeout_s: seconds from the entry of this rank.
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
            self.report(WorkerError(not_in_collective(missing, self._rank, timeout_s)))

    def _leave(self) -> None:
        """At exit after a failure: report it, and end the process at once. The interpreter would take seconds to free
        captured graphs, on a busy machine more than the other ranks wait.

        Without a failure this ends the thread. The interpreter ends daemon threads by unwinding their stacks, and if
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
        """Announce that this rank leaves, and stop watching; further calls have no effect."""
        if self._connections is not None:
            self._connections.leave()
        atexit.unregister(self._leave)
        self._stopped.set()
        self._thread.join()

    def connect(self) -> None:
        """Connect to the other ranks, so that the end of a process is detected; all ranks call this."""
        store = dist.distributed_c10d._get_default_store()
        size = 1 + len(self._others)
        self._connections = PeerConnections(store, self._rank, size, self._died, self._rank_0_left)

    def _died(self, failure: WorkerError) -> None:
        self._rank_0_ended.set()
        self.report(failure)

    def _rank_0_left(self) -> None:
        self._store_may_end = hosts_store(0)
        self._rank_0_ended.set()

    def _ended_in_order(self) -> bool:
        """Whether the store ended without a failure: after its host left, which the connection to it shows, perhaps
        later than the store."""
        deadline = time.monotonic() + (
            _GRACE_S if self._rank and self._connections is not None and hosts_store(0) else 0
        )
        while not self._stopped.is_set() and not self._rank_0_ended.wait(0.05) and time.monotonic() < deadline:
            pass
        return self._stopped.is_set() or self._store_may_end

    def _look(self) -> None:
        store = self._store
        while not self._stopped.wait(_POLL_S):
            try:
                beat(store, self._rank)
                if not store.check([FAILURE_KEY]):
                    continue
                reason = store.get(FAILURE_KEY).decode()
                acknowledge(store, self._rank)
                if hosts_store(self._rank):
                    linger(store, self._others)
            except RuntimeError:
                if self._ended_in_order():
                    return
                reason = store_ended()
            if self._stopped.wait(_GRACE_S if self.reported else 0):
                return
            sys.stderr.write(f"panpipe: {reason}; rank {self._rank} stops too\n")
            sys.stderr.flush()
            os._exit(1)
