"""Detects the failure, death or hang of any rank, and stops all ranks, with its number and the reason.

1. A rank that fails writes its reason to the job's store before it exits, also for an error in the user's code. The
   first reason is kept.
2. The death of a killed rank is detected by ranks that communicate with it or are on its host, and they write the
   reason. `lost_ranks` decides which rank is lost and what is written.
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
import select
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from attrs import evolve

from ...core.errors import WorkerError, message_of
from .activity import HERE, QuietTime
from .lost_ranks import (
    FAILURE_KEY,
    documents,
    hosts_store,
    left_early,
    linger,
    own_connection,
    position_key,
    process_ended,
    reason_of,
    store_ended,
    uses_agent_store,
    without_torch_warnings,
)
from .positions import LEFT_S, UNKNOWN, Position, hangs, reason_of_hang, table
from .process import WHERE, end_process, failure_at_exit, print_once, stops_too

_POLL_S = 0.5
_TICK_S = 0.25
_PART = 0.05
"""The processor time that counts as progress of a computation, as a part of the limit; panpipe's threads use less."""
_REPORT_S = 10.0
"""Most seconds that a rank tries to report its failure."""
_LEAVES_S = 6.0
"""Most seconds that a rank that leaves waits for its thread: a call of the store ends within 5 s."""
_GRACE_S = 3.0
"""Most seconds for a rank that detected a peer's failure to raise it from its main thread."""
_READERS = 100
"""Ranks that read all positions in a second."""


def process_here() -> tuple[str, int]:
    """This host's boot with the namespace in which process numbers count, and the number of this process."""
    host = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        host = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return host, os.getpid()


class FailureWatch:
    """Watches the job's store for failures, and the other ranks for progress, from threads.

    Args:
        store: the job's, with keys of this pipeline alone; all ranks have arrived there.

    Attributes:
        reported: whether this rank has reported that it stops.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._pid = os.getpid()
        self._rank, self._timeout_s = rank, timeout_s
        self._others = [other for other in range(size) if other != rank]
        # Separate connections: the main thread may wait in the default one, and reports use the second.
        self._quiet = ExitStack()
        self._quiet.enter_context(without_torch_warnings())
        self._store, self._reports = own_connection(store), own_connection(store)
        self._every_s = max(min(_POLL_S, timeout_s / 8), size / _READERS)
        self._tick_s = min(_TICK_S, timeout_s / 8)
        self._process = process_here()
        self._numbers = itertools.count(1)
        self._silent = {other: QuietTime(4 * self._every_s) for other in self._others}
        self._found: Mapping[int, Position] = {}
        self._processes = _Processes()
        self.reported, self._reporting, self._store_ended = False, False, False
        self._first: str | None = None
        self._answers = 0
        self._quiet_s = self._unanswered_s = 0.0
        self._stopped = threading.Event()
        self._clock, self._exchange = (
            threading.Thread(target=run, name=f"panpipe failure watch, {name}", daemon=True)
            for name, run in (("clock", self._measure), ("exchange", self._look))
        )
        self._clock.start()
        self._exchange.start()
        WHERE.add(self)
        atexit.register(self._leave)

    def report(self, failure: BaseException) -> str:
        """Report why this rank stops, and return the first reason, for which all stop.

        A rank that detected a dead one stops, too, and its other neighbours may then detect its end. Here they read the
        original reason.
        """
        if self._first is not None:
            return self._first
        self._reporting = True
        try:
            reason = self._left_early(failure) or reason_of(failure, self._rank, self._others, self._reports)
            self.reported = True
            first: str = self._reports.compare_set(FAILURE_KEY, "", reason).decode()
            self._first = first
            self._publish(self._reports)
            if hosts_store(self._rank):
                linger(self._reports, self._others)
        except RuntimeError:
            self.reported = True
            return self._first or self._reason_without_store()
        finally:
            self._reporting = False
        return first

    def _left_early(self, failure: BaseException) -> str | None:
        """The reason if a rank that a transport lost had closed its pipeline before; else None."""
        lost = failure.lost if isinstance(failure, WorkerError) else ()
        left = self._left(documents(self._reports, [rank for rank in lost if rank in self._others]))
        return left_early(left, self._rank, HERE.text()) if left else None

    @staticmethod
    def _left(found: Mapping[int, bytes]) -> dict[int, str]:
        why = {rank: Position.of_document(document).left for rank, document in found.items()}
        return {rank: left for rank, left in why.items() if left is not None}

    def where(self) -> str:
        """Where every rank is now, a line for each, as the last exchange found."""
        ranks = sorted([self._rank, *self._others])
        silent_s = self._unanswered_s if self._unanswered_s > 2 * self._every_s else 0
        note = f", and the job's store gives no answer for {silent_s:.1f} s" if silent_s else ""
        return (
            f"as rank {self._rank} knows, of others {self._every_s:g} s ago or less{note}\n"
            f"{table(self._positions(), ranks)}"
        )

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
        if os.getpid() != self._pid:  # a fork has the connections of its parent
            return
        failure = failure_at_exit()
        if failure is None:
            self.stop()
            return
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
            if hosts_store(self._rank):
                linger(self._reports, self._others)
        self._processes.close()
        self._quiet.close()

    def _look(self) -> None:
        """Publish this rank's position, and look for a reason to stop, again and again; a thread's function."""
        store = self._store
        while not self._stopped.wait(self._every_s):
            try:
                self._publish(store)
                self._read(store)
                own = self._positions()
                hung = hangs(self._rank, own, self._timeout_s)
                if hung:
                    store.compare_set(FAILURE_KEY, "", reason_of_hang(self._rank, own, self._timeout_s))
                ended = documents(store, self._processes.ended(self._found, self._process))
                for rank in ended.keys() - self._left(ended).keys():
                    store.compare_set(FAILURE_KEY, "", process_ended(rank))
                self._answers += 1
                if not store.check([FAILURE_KEY]):
                    continue
                self._first = reason = store.get(FAILURE_KEY).decode()
                self._publish(store)  # from now on the host may end
                if hosts_store(self._rank):
                    linger(store, self._others)
            except RuntimeError:
                if self._first is None:
                    self._store_ended = True
                    return
                hung, reason = False, self._first
            if not self._stopped.wait(_GRACE_S if self.reported and not hung else 0):
                self._end(reason)
            return

    def _read(self, store: Any) -> None:
        """Read the positions of the others. How long one was silent is measured between calls."""
        found = {}
        for rank, document in documents(store, self._others).items():
            found[rank] = evolve(Position.of_document(document), silent_s=self._silent[rank].update(document))
        self._found = found

    def _measure(self) -> None:
        """Measure the times, and end this rank if the store is silent or has ended; a thread's function."""
        quiet, silent, reporting = (QuietTime(4 * self._tick_s) for _ in range(3))
        while not self._stopped.wait(self._tick_s):
            WHERE.poll()
            self._quiet_s = quiet.update((HERE.count, HERE.on, self._computed()))
            self._unanswered_s = silent.update(self._answers)
            reason = self._without_answer(reporting.update(self._reporting))
            if reason is not None and not self._stopped.is_set():
                self._end(reason)

    def _computed(self) -> int:
        """How much processor time this process has taken, coarsely, if that is progress; otherwise 0."""
        return int(time.process_time() / (_PART * self._timeout_s)) if HERE.computing else 0

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
        why = self._found.get(0, UNKNOWN).left
        return store_ended() if why is None else left_early({0: why}, self._rank, HERE.text())

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
        print_once(stops_too(reason, self._rank))
        os._exit(1)  # without what may wait for the main thread


class _Processes:
    """The processes of the other ranks of this host: the kernel reports the end of one at once.

    A transport detects a killed rank at most when another rank communicates with it, and not every transport does:
    NCCL's kernels wait on the GPU for a counterpart that never comes. A slow or stopped process has not ended. The
    ranks of other hosts are ended by ``torchrun``'s agents, or named after the limit.
    """

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._poll = select.poll()

    def ended(self, found: Mapping[int, Position], own: tuple[str, int]) -> list[int]:
        """The ranks whose processes have ended, in order or not.

        Args:
            found: the positions of the other ranks.
            own: host and number of this process.
        """
        ended = []
        for rank, position in found.items():
            host, number = position.process
            if host != own[0] or not host or rank in self._open:
                continue
            try:
                descriptor = self._open[rank] = os.pidfd_open(number)
            except ProcessLookupError:
                ended.append(rank)
            except (OSError, AttributeError):  # a system without it
                continue
            else:
                self._poll.register(descriptor, select.POLLIN)
        known = {descriptor for descriptor, _ in self._poll.poll(0)}
        return ended + [rank for rank, descriptor in self._open.items() if descriptor in known]

    def close(self) -> None:
        """Close the descriptors."""
        while self._open:
            os.close(self._open.popitem()[1])
