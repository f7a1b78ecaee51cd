"""Detects the failure, death or hang of any rank, and stops all ranks, with its number and the reason.

1. A rank that fails writes its reason to the job's store before it exits, also for an error in the user's code. The
   first reason is kept.
2. The death of a killed rank is detected by ranks that communicate with it or are on its host, and they write the
   reason. Where a transport suspects several ranks, those that publish nothing any more are lost.
3. Every rank publishes its position, and reads the others'. If it hangs by the rule in `positions`, it writes the
   reason.
4. A rank that has read the reason says so in its position, and the rank that hosts the store waits until all have.

Two threads of every rank do this, because its main thread may wait in a transfer that cannot be interrupted, and a call
of the store does not return while the host of the store is stopped::

    exchange    publishes and reads positions and the reason, twice a second
    clock       measures the time without progress, and the time without an answer of the store; prints on a signal
"""

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

from attrs import evolve

from ...backends.gloo import lost
from ...core.errors import WorkerError, message_of
from .activity import HERE, QuietTime
from .failure import shortened, stopped
from .positions import LEFT_S, UNKNOWN, Position, hangs, named, reason_of_hang, table
from .process import WHERE, end_process, failure_at_exit, has_ended, print_stop, process_here, without_torch_warnings

FAILURE_KEY = "failure"
"""The key of the reason for which all ranks stop."""
_POLL_S, _SHORT_POLL_S = 0.5, 0.1
"""Seconds between two exchanges, and between two looks of a rank that waits for the others'."""
_TICK_S = 0.25
_PART = 0.05
"""The processor time that counts as progress of a computation, as a part of the limit; panpipe's threads use less."""
_ANSWER = timedelta(seconds=5)
"""Most time that a call of the store waits for a key."""
_REPORT_S = 10.0
"""Most seconds that a rank tries to report its failure."""
_LEAVES_S = 6.0
"""Most seconds that a rank that leaves waits for its thread: a call of the store ends within 5 s."""
_GRACE_S = 3.0
"""Most seconds for a rank that detected a peer's failure to raise it from its main thread."""
_LINGER_S = 5.0
"""Most seconds that a failed rank that hosts the store waits, so that the others can read the reason. A fixed wait of
one second is not enough: a rank that got no processor time in it found no store, and reported its host as dead."""
_SILENCE_S = 3.0
"""Seconds without a new position after which a rank counts as dead, once another rank has failed."""
_READERS = 100
"""Ranks that read all positions in a second."""


def uses_agent_store() -> bool:
    """Whether ``torchrun`` hosts the job's store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def hosts_store(rank: int) -> bool:
    """Whether the job's store ends with this rank."""
    return rank == 0 and not uses_agent_store()


def store_ended() -> str:
    """The reason if the host of the store stopped."""
    if uses_agent_store():
        return "the process that started the job stopped: its store is gone"
    return "rank 0 stopped: the job's store, which it hosts, is gone"


def position_key(rank: int) -> str:
    """The key of a rank's position; it is there as soon as the rank has arrived."""
    return f"position/{rank}"


def published(store: Any, ranks: Sequence[int]) -> dict[int, Position]:
    """The positions that ranks have published last; all must have arrived."""
    found = store.multi_get([position_key(rank) for rank in ranks]) if ranks else []
    return {rank: Position.of_document(document) for rank, document in zip(ranks, found, strict=True)}


def _missing(store: Any, ranks: Sequence[int], seconds: float, done: Callable[[Position, bool], bool]) -> list[int]:
    """Wait until something holds for every rank, at most some seconds; returns those for which it does not.

    Args:
        done: called with a rank's position, and with whether it has published a new one meanwhile.
    """
    first, deadline = published(store, ranks), time.monotonic() + seconds
    missing = list(ranks)
    while True:
        now = published(store, missing)
        missing = [rank for rank in missing if not done(now[rank], now[rank].number != first[rank].number)]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_SHORT_POLL_S)


def linger(store: Any, rank: int, others: Sequence[int]) -> None:
    """If this rank hosts the store, wait until the others know the reason, have left or are silent."""
    silent_s = time.monotonic() + _SILENCE_S

    def done(position: Position, changed: bool) -> bool:
        return position.stops or position.left is not None or (not changed and time.monotonic() > silent_s)

    if hosts_store(rank):
        _missing(store, others, _LINGER_S, done)


def reason_of(failure: BaseException, rank: int, others: Sequence[int], store: Any) -> str:
    """Why all ranks stop after a failure on this one: which ranks are lost, or what this one raised."""
    # A collective fails if another rank died, without that rank's number.
    suspects: Sequence[int] = others if isinstance(failure, RuntimeError) else ()
    cause = failure
    if isinstance(failure, WorkerError):
        suspects, cause = failure.suspects, failure.__cause__ or failure
    dead = _missing(store, suspects, _SILENCE_S, lambda position, changed: changed)
    if dead:
        return shortened(f"{named(dead)} stopped answering: {lost(cause)}")
    if isinstance(failure, WorkerError):
        return shortened(message_of(failure))
    if isinstance(failure, RuntimeError) and lost(failure) != " ".join(message_of(failure).split()):
        return f"{named(others)} stopped answering rank {rank}: {lost(failure)}"
    return stopped(rank, failure)


class FailureWatch:
    """Watches the job's store for failures, and the other ranks for progress, from threads.

    Args:
        store: the job's, with keys of this pipeline alone; all ranks have arrived there.

    Attributes:
        reported: whether this rank has reported that it stops.
        close: called at exit without a failure.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._pid = os.getpid()
        self._rank, self._timeout_s = rank, timeout_s
        self._others = [other for other in range(size) if other != rank]
        self._quiet = ExitStack()
        self._quiet.enter_context(without_torch_warnings())
        # Separate connections: the main thread may wait in the default one, and reports use the second.
        self._store, self._reports = store.clone(), store.clone()
        for own in (self._store, self._reports):
            own.set_timeout(_ANSWER)
        self._every_s = max(min(_POLL_S, timeout_s / 8), size / _READERS)
        self._tick_s = min(_TICK_S, timeout_s / 8)
        self._process = process_here()
        self._numbers = itertools.count(1)
        self._silent = {other: QuietTime(4 * self._every_s) for other in self._others}
        self._found: Mapping[int, Position] = {}
        self.reported, self._reporting, self._store_ended = False, False, False
        self._first: str | None = None
        self._answers, self._quiet_s, self._unanswered_s = 0, 0.0, 0.0
        self._stopped = threading.Event()
        self._clock, self._exchange = (
            threading.Thread(target=run, name=f"panpipe failure watch, {name}", daemon=True)
            for name, run in (("clock", self._measure), ("exchange", self._look))
        )
        self._clock.start()
        self._exchange.start()
        WHERE.add(self)
        self.close: Callable[[], None] = self.stop
        atexit.register(self._leave)

    def report(self, failure: BaseException) -> str:
        """Report why this rank stops, and return the first reason, for which all stop.

        A rank that detected a dead one stops, too, and its other neighbours may then detect its end. Here they read the
        original reason.
        """
        if self._first is not None:  # the exchange has read it; it lingers, too, but this process may end before
            with suppress(RuntimeError):
                linger(self._reports, self._rank, self._others)
            return self._first
        self._reporting = True
        lost_here = failure.lost if isinstance(failure, WorkerError) else ()
        with suppress(RuntimeError):  # the store's host may have ended
            reason = self._left_early(published(self._reports, [rank for rank in lost_here if rank in self._others]))
            reason = reason or reason_of(failure, self._rank, self._others, self._reports)
            self.reported = True
            self._first = self._reports.compare_set(FAILURE_KEY, "", reason).decode()
            self._publish(self._reports)
            linger(self._reports, self._rank, self._others)
        self.reported, self._reporting = True, False
        return self._first or self._reason_without_store()

    def _left_early(self, found: Mapping[int, Position]) -> str:
        """The reason if this rank waits for ranks that have closed their pipelines; empty if none of these has."""
        left = [f"rank {rank} has closed its pipeline{at.left}" for rank, at in found.items() if at.left is not None]
        if not left:
            return ""
        return (
            f"{'; '.join(left)}; rank {self._rank} waits for it {HERE.text()}: every rank of a pipeline must take the "
            "same batches and call the same methods in the same order"
        )

    def where(self) -> str:
        """Where every rank is now, a line for each, as the last exchange found."""
        ranks = sorted([self._rank, *self._others])
        silent_s = self._unanswered_s if self._unanswered_s > 2 * self._every_s else 0
        note = f", and the job's store gives no answer for {silent_s:.1f} s" if silent_s else ""
        head = f"as rank {self._rank} knows, of others {self._every_s:g} s ago or less{note}"
        return f"{head}\n{table(self._positions(), ranks)}"

    def _own(self) -> Position:
        host_left = hosts_store(0) and self._found.get(0, UNKNOWN).left is not None
        stops = self._first is not None or host_left
        return Position.of(HERE, self._quiet_s, stops=stops, process=self._process)

    def _positions(self) -> dict[int, Position]:
        return {**self._found, self._rank: self._own()}

    def _publish(self, store: Any, left: str | None = None) -> None:
        store.set(position_key(self._rank), evolve(self._own(), left=left).document(next(self._numbers)))

    def _leave(self) -> None:
        """At exit after a failure: report it, and end the process at once. The interpreter would take seconds to free
        captured graphs, on a busy machine more than the other ranks wait.

        Without a failure this ends the threads. The interpreter ends daemon threads by unwinding their stacks, and if
        one is inside a call of the store, C++ aborts: ``terminate called without an active exception``.
        """
        failure = failure_at_exit()
        if failure is None:
            self.close()
        elif os.getpid() == self._pid:  # a fork has the connections of its parent
            if not self.reported:
                self.report(failure)
            end_process()

    def stop(self, failure: BaseException | None = None) -> None:
        """Announce that this rank leaves, and stop watching; further calls have no effect.

        Args:
            failure: why it leaves early; None for the end of its work.
        """
        if self._stopped.is_set() or os.getpid() != self._pid:
            return
        self._stopped.set()
        WHERE.remove(self)
        atexit.unregister(self._leave)
        self._clock.join()
        self._exchange.join(_LEAVES_S)
        if self._exchange.is_alive():
            return  # the store does not answer
        last = f" after {HERE.last}" if HERE.last else " before it was built"
        why = last if failure is None else f"{last}, because of {type(failure).__name__}: {message_of(failure)}"
        with suppress(RuntimeError):  # the store's host may have ended
            self._publish(self._reports, why)
            linger(self._reports, self._rank, self._others)
        self._quiet.close()

    def _look(self) -> None:
        """Publish this rank's position, and look for a reason to stop, again and again; a thread's function."""
        store = self._store
        while not self._stopped.wait(self._every_s):
            try:
                self._publish(store)
                self._found = {  # how long one was silent is measured between exchanges
                    rank: evolve(position, silent_s=self._silent[rank].update(position.number))
                    for rank, position in published(store, self._others).items()
                }
                own = self._positions()
                hung = hangs(self._rank, own, self._timeout_s)
                if hung:
                    store.compare_set(FAILURE_KEY, "", reason_of_hang(self._rank, own, self._timeout_s))
                ended = [rank for rank, there in self._found.items() if has_ended(there.process, self._process)]
                for rank, position in published(store, ended).items():
                    if position.left is None:
                        store.compare_set(FAILURE_KEY, "", f"rank {rank} stopped answering: its process ended")
                self._answers += 1
                if not store.check([FAILURE_KEY]):
                    continue
                self._first = reason = store.get(FAILURE_KEY).decode()
                self._publish(store)  # from now on the host may end
                linger(store, self._rank, self._others)
            except RuntimeError:
                if self._first is None:
                    self._store_ended = True
                    return
                hung, reason = False, self._first
            if not self._stopped.wait(_GRACE_S if self.reported and not hung else 0):
                self._end(reason)
            return

    def _measure(self) -> None:
        """Measure the times, and end this rank if the store is silent or has ended; a thread's function."""
        quiet, silent, reporting = (QuietTime(4 * self._tick_s) for _ in range(3))
        while not self._stopped.wait(self._tick_s):
            WHERE.poll()
            # If a computation is progress, the processor time that this process has taken, coarsely.
            computed = int(time.process_time() / (_PART * self._timeout_s)) if HERE.computing else 0
            self._quiet_s = quiet.update((HERE.count, HERE.on, computed))
            self._unanswered_s = silent.update(self._answers)
            reason = self._without_answer(reporting.update(self._reporting))
            if reason is not None and not self._stopped.is_set():
                self._end(reason)

    def _without_answer(self, reporting_s: float) -> str | None:
        """Why this rank cannot go on without the store; None if it can, or if the exchange decides."""
        on, quiet_s, unanswered_s, limit = HERE.on, self._quiet_s, self._unanswered_s, self._timeout_s
        if self._store_ended:
            # Other ranks may have work to do after the host of the store has left.
            waits_s = min(limit, LEFT_S) if 0 in on or self._found.get(0, UNKNOWN).left is None else limit
            return self._reason_without_store() if on and quiet_s >= waits_s else None
        if hosts_store(self._rank):
            return None
        unreported = self._reporting and min(reporting_s, 2 * unanswered_s) >= min(limit, _REPORT_S)
        return self._silent_store() if unreported or (on and min(quiet_s, unanswered_s) >= limit) else None

    def _reason_without_store(self) -> str:
        """The reason of a rank that cannot go on after the store has ended."""
        return self._left_early({0: self._found.get(0, UNKNOWN)}) or store_ended()

    def _silent_store(self) -> str:
        """The reason if the process that hosts the store gives no answer: it is stopped, or its host is."""
        own, unanswered_s = self._own(), self._unanswered_s
        if uses_agent_store():
            return (
                f"the process that started the job, with its store, gave no answer for {unanswered_s:.3g} s, and rank "
                f"{self._rank} is {own.text}: see what it does, or raise timeout_s, which is {self._timeout_s:g} s"
            )
        host = evolve(self._found.get(0, UNKNOWN), quiet_s=0.0, silent_s=unanswered_s, on=())
        waits = evolve(own, on=(0,), quiet_s=max(own.quiet_s, unanswered_s))
        return reason_of_hang(self._rank, {self._rank: waits, 0: host}, self._timeout_s)

    def _end(self, reason: str) -> None:
        print_stop(reason, self._rank)
        os._exit(1)  # without what may wait for the main thread
