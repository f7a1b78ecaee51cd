"""Detects the failure or death of any rank, and stops all ranks within seconds, with its number and the reason.

1. A rank that fails writes its reason to the job's store before it exits, also for an error in the user's code. The
   first reason is kept.
2. The death of a killed rank is detected by ranks that communicate with it or are on its host (`processes`), and they
   write the reason. `lost_ranks` decides which rank is lost and what is written.
3. A rank that waits reads the positions that every rank publishes. If it hangs by the rule in `positions`, it writes
   the reason.
4. A thread of every rank does this and checks for a reason twice a second: its main thread may wait in a transfer that
   cannot be interrupted. A rank that has read the reason records that, and the rank that hosts the store waits until
   all have. Another thread, the `watchdog`, ends the rank if the store gives no answer.
"""

import atexit
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...core.errors import WorkerError, message_of
from .activity import HERE, Activity
from .job_store import JobStore
from .lost_ranks import (
    acknowledge,
    beat,
    hosts_store,
    left_early,
    linger,
    process_ended,
    reason_of,
    store_ended,
)
from .positions import Position, hangs, reason_of_hang, table
from .processes import Processes
from .published_positions import PublishedPositions
from .signals import WHERE, Describer
from .timeout import TIMEOUT_S
from .torch_log import TORCH_LOG
from .uncaught import failure_at_exit
from .watchdog import Watchdog, end_process

FAILURE_KEY = "panpipe/failure"
"""The key of the reason in the job's store."""
_POLL_S = 0.5
_ANSWER_S = 3.0
"""Most seconds that the store has to answer where the ranks are."""
_LEAVES_S = 6.0
"""Most seconds that a rank that leaves waits for its thread: a call of the store ends within 5 s."""
_GRACE_S = 3.0
"""Most seconds for a rank that detected a peer's failure to raise it from its main thread."""
_RECENT_S = 2.0
"""A rank with an answer of the store within these seconds knows whether its host left: that waits for such ranks."""


class FailureWatch:
    """Watches the job's store for failures, and the other ranks for progress, from threads.

    Args:
        rank: this rank.
        size: how many there are.
        timeout_s: the limit on waiting without progress.
        activity: of this process.
        store: the job's; None for that of the default process group.
        owns_keys: whether all keys with the store's prefix are of this pipeline: they are removed when all ranks have
            left.

    Attributes:
        reported: whether this rank has reported that it stops.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_s: float = TIMEOUT_S,
        activity: Activity = HERE,
        store: Any = None,
        owns_keys: bool = False,
    ) -> None:
        self._pid = os.getpid()
        self._rank, self._timeout_s, self._activity = rank, timeout_s, activity
        self._others = [other for other in range(size) if other != rank]
        default = self._default = dist.distributed_c10d._get_default_store() if store is None else store
        self._host_ended = threading.Event()
        # Separate connections: the main thread may wait in the default one, reports use the second, `where` the third.
        self._store, self._reports, self._asked = (self._connection(default) for _ in range(3))
        self._owns_keys, self._stopped = owns_keys, threading.Event()
        self.reported = False
        self._first: str | None = None
        self._processes: Processes | None = None
        self._poll_s = min(_POLL_S, timeout_s / 8)
        self._watchdog = Watchdog(rank, activity, timeout_s, self._end)
        self._published = PublishedPositions(rank, size, timeout_s)
        with suppress(RuntimeError):  # the thread sees that the store has ended
            self._published.write(self._store, self._watchdog.position(), 0)  # a rank that is connected has a position
            self._watchdog.host = self._published.host(self._store)
            self._processes = Processes(self._store, rank)  # last: not every store can append
        self._thread = threading.Thread(target=self._look, name="panpipe failure watch", daemon=True)
        self._thread.start()
        self._describer = Describer(self.where)
        WHERE.add(self._describer)
        atexit.register(self._leave)

    def _connection(self, default: Any) -> JobStore:
        with TORCH_LOG.without_warnings():
            store = default.clone() if hasattr(default, "clone") else default
        store.set_timeout(timedelta(seconds=5))
        return JobStore(store, self._host_ended)

    def report(self, failure: BaseException) -> str:
        """Report why this rank stops, and return the first reason, for which all stop.

        A rank that detected a dead one stops, too, and its other neighbours may then detect its end. Here they read the
        original reason.
        """
        if self._first is not None:
            return self._first
        store, self._watchdog.reporting = self._reports, True
        try:
            reason = self._left_early(failure) or reason_of(failure, self._rank, self._others, store)
            self.reported = True
            first: str = store.compare_set(FAILURE_KEY, "", reason).decode()
            self._first = first
            acknowledge(store, self._rank)
            if hosts_store(self._rank):
                linger(store, self._others)
        except RuntimeError:
            self.reported = True
            return self._watchdog.left_by_rank_0() if self._ended_in_order() else store_ended()
        finally:
            self._watchdog.reporting = False
        return first

    def _left_early(self, failure: BaseException) -> str | None:
        """The reason if a rank that a transport lost had closed its pipeline before; else None."""
        lost = failure.lost if isinstance(failure, WorkerError) else ()
        left = self._published.left(self._reports, lost)
        return left_early(left, self._rank, self._activity.text()) if left else None

    def where(self) -> str:
        """Where every rank is now, a line for each; where the store gives no answer, this rank's line alone."""
        own, ranks = self._watchdog.position(), sorted([self._rank, *self._others])
        found: dict[int, Position] = {}

        def read() -> None:
            with suppress(RuntimeError):
                found.update(self._published.read(self._asked, own))

        thread = threading.Thread(target=read, name="panpipe positions", daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        if not found:
            return f"the job's store gives no answer; here\n{table({self._rank: own}, [self._rank])}"
        return f"as rank {self._rank} knows, of others {self._poll_s:g} s ago or less\n{table(found, ranks)}"

    def _leave(self) -> None:
        """At exit after a failure: report it, and end the process at once. The interpreter would take seconds to free
        captured graphs, on a busy machine more than the other ranks wait.

        Without a failure this ends the thread. The interpreter ends daemon threads by unwinding their stacks, and if
        one is inside a call of the store, C++ aborts: ``terminate called without an active exception``.
        """
        if os.getpid() != self._pid:  # a fork has the connections of its parent
            return
        failure = failure_at_exit()
        if failure is None:
            self.stop()
            self._thread.join()  # its calls of the store are limited in time
            return
        if not self.reported:
            self.report(failure)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def stop(self, failure: BaseException | None = None) -> None:
        """Announce that this rank leaves, and stop watching; further calls have no effect.

        Args:
            failure: why it leaves early; None for the end of its work.
        """
        if self._stopped.is_set() or os.getpid() != self._pid:
            return
        self._stopped.set()
        WHERE.remove(self._describer)
        self._watchdog.stop()
        self._thread.join(_LEAVES_S)
        answers = not self._thread.is_alive()
        if answers:
            self._publish_end(failure)
        if answers and self._processes is not None:
            self._processes.close()
        if answers and self._owns_keys:
            self._forget()
        if answers:
            atexit.unregister(self._leave)
        else:
            self._host_ended.set()  # the thread makes no further call; at exit it is waited for

    def _publish_end(self, failure: BaseException | None) -> None:
        """Publish that this rank has left; the host of the store waits until the others know that, or have left."""
        last = f" after {self._activity.last}" if self._activity.last else " before it was built"
        why = last if failure is None else f"{last}, because of {type(failure).__name__}: {message_of(failure)}"
        with suppress(RuntimeError):  # the store's host may have ended
            acknowledge(self._reports, self._rank)
            self._published.end(self._reports, why)
            if hosts_store(self._rank):
                linger(self._reports, set(self._others).difference(self._published.absent(self._reports, self._others)))

    def _forget(self) -> None:
        """Remove the keys of this pipeline if all ranks have left it: a job may build many pipelines."""
        with suppress(RuntimeError):
            if self._reports.add("panpipe/left", 1) == 1 + len(self._others):
                self._reports.remove_all()

    def _ended_in_order(self) -> bool:
        """Whether the store ended after its host had left."""
        return self._stopped.is_set() or (hosts_store(0) and self._watchdog.host.left is not None)

    def _look(self) -> None:
        """Publish this rank's position and look for a reason to stop, again and again; the function of the thread."""
        store, watchdog, answered = self._store, self._watchdog, time.monotonic()
        while not self._stopped.wait(self._poll_s):
            try:
                found = beat(store, self._rank)
                hang = self._hang(found)
                if hang is not None:
                    store.compare_set(FAILURE_KEY, "", hang)
                self._note_ends()
                if not store.check([FAILURE_KEY]):
                    watchdog.answered()
                    answered = time.monotonic()
                    continue
                self._first = reason = store.get(FAILURE_KEY).decode()
                acknowledge(store, self._rank)  # from now on the host may end
                if hosts_store(self._rank):
                    linger(store, self._others)
            except RuntimeError:
                if self._ended_in_order() or (self._first is None and time.monotonic() - answered > _RECENT_S):
                    watchdog.store_has_ended = True
                    return
                hang, reason = None, self._first or store_ended()
            if self._stopped.wait(_GRACE_S if self.reported and hang is None else 0):
                return
            self._end(reason)

    def _note_ends(self) -> None:
        """Write the reason if the process of a rank has ended that had not left; note if the store's host has left."""
        for rank in self._processes.ended() if self._processes is not None else ():
            if not self._published.left(self._store, [rank]):
                self._store.compare_set(FAILURE_KEY, "", process_ended(rank))
        if hosts_store(0) and self._watchdog.host.left is not None:
            acknowledge(self._store, self._rank)

    def _hang(self, beat_now: int) -> str | None:
        """Publish where this rank is, and read where the others are; the reason if this rank hangs."""
        own, published = self._watchdog.position(), self._published
        published.write(self._store, own, beat_now)
        self._watchdog.host = published.host(self._store)
        if not published.reads(own):
            return None
        found = published.read(self._store, own)
        return reason_of_hang(self._rank, found, self._timeout_s) if hangs(self._rank, found, self._timeout_s) else None

    def _end(self, reason: str) -> None:
        end_process(reason, self._rank)
