"""When one rank stops, all ranks stop within seconds, with that rank's number and reason.

1. A rank that fails writes its reason to the job's store before it exits, also for an error in the user's code. The
   first reason is kept.
2. The death of a killed rank is detected by ranks that communicate with it, and they write the reason. If the transport
   does not report which rank died, as in a collective, heartbeats show it: every rank writes one twice a second.
3. A rank that does not enter a collective that all others have entered is named by a time-out: it may be alive, and
   wait for them elsewhere.
4. A thread of every rank checks for a reason twice a second: its main thread may wait in a transfer that cannot be
   interrupted. A rank that has read the reason records that, and the rank that hosts the store waits until all have.
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
"""The key of the reason in the job's store."""
_POLL_S = 0.5
LINGER_S = 5.0
"""Most seconds that a failed rank that hosts the store waits, so that the others can read the reason."""
_SILENCE_S = 3.0
"""Seconds without a heartbeat after which a rank counts as dead, once another rank has failed."""
_GRACE_S = 3.0
"""Most seconds for a rank that detected a peer's failure to raise it from its main thread."""
_STORE_GONE = {
    False: "rank 0 stopped: the job's store, which it hosts, is gone",
    True: "the process that started the job stopped: its store is gone",
}


def uses_agent_store() -> bool:
    """Whether ``torchrun`` hosts the job's store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def hosts_store(rank: int) -> bool:
    """Whether the job's store ends with this rank."""
    return rank == 0 and not uses_agent_store()


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
    beats, deadline = _Heartbeats(store, ranks), time.monotonic() + LINGER_S
    while time.monotonic() < deadline and any(not store.check([_read_key(rank)]) for rank in beats.not_silent()):
        time.sleep(_POLL_S / 5)


def numbered(ranks: Sequence[int]) -> str:
    """Ranks in words: ``rank 1``, ``ranks 1, 2``."""
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def _read_key(rank: int) -> str:
    return f"panpipe/read/{rank}"


def _beat_key(rank: int) -> str:
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
        return int(self._store.add(_beat_key(rank), 0))

    def _look(self) -> None:
        now = time.monotonic()
        for rank, (count, _) in self._last.items():
            found = self._count(rank)
            if found != count:
                self._last[rank] = found, now

    def not_silent(self) -> list[int]:
        """Ranks with a heartbeat within the last `_SILENCE_S`; in the first `_SILENCE_S`, all."""
        self._look()
        now = time.monotonic()
        return [rank for rank, (_, heard) in self._last.items() if now - heard < _SILENCE_S]

    def silent(self) -> list[int]:
        """Ranks without a heartbeat for `_SILENCE_S`; returns at once when all have sent one."""
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
        """Report why this rank stops, and return the first reason, for which all stop.

        A rank that detected a dead one stops, too, and its other neighbours may then detect its end. Here they read the
        original reason.
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
            self.report(WorkerError(
                f"{numbered(missing)} did not come within {timeout_s:g} s to where rank {self._rank} waits: every rank "
                "of a pipeline takes the same batches and calls the same methods in the same order; see what it does"
            ))  # fmt: skip

    def _reason(self, failure: BaseException) -> str:
        if isinstance(failure, WorkerError):
            suspects: Sequence[int] = failure.suspects
        else:
            # A collective fails if another rank died, without that rank's number.
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
        """Stop watching; further calls have no effect."""
        atexit.unregister(self._leave)
        self._stopped.set()
        self._thread.join()

    def expect_end_of_store(self) -> None:
        """The rank that hosts the store has left without a failure: the end of the store is no failure."""
        if hosts_store(0):
            self._store_may_end = True

    def _look(self) -> None:
        store = self._store
        while not self._stopped.wait(_POLL_S):
            try:
                store.add(_beat_key(self._rank), 1)
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
