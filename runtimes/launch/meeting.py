"""Connects a rank to the job's store and watches it as early as possible, before all ranks have arrived.

A rank may die while it imports, reads its model or captures, long before it waits for others. So that the others
notice, it connects early, and then continues with its work::

    import panpipe ──▶ present ──▶ connected to rank 0, watched ──▶ pipeline(): capture ──▶ waits for all (`arrival`)
    (by hand)          (under torchrun from pipeline() on: its agent sees deaths before)

As long as a rank is not connected to rank 0, only the ranks of the same host detect its death (`watch/presence`).

Where ranks were started by hand, ``import panpipe`` begins this, if the environment has all of RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. A rank that never calls ``panpipe.pipeline`` is not ended because of others.
"""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...core.errors import PanpipeError, RequestError, WorkerError, message_of
from ..watch.address import listen_for_store
from ..watch.lost_ranks import hosts_store, store_ended
from ..watch.presence import Presence, presence_of
from ..watch.process_start import begin_by_hand, uses_agent_store
from ..watch.signals import WHERE
from ..watch.timeout import timeout_of
from ..watch.torch_log import TORCH_LOG
from ..watch.uncaught import print_uncaught_in_a_line
from ..watch.watch import FailureWatch
from ..watch.watchdog import end_process

_SOON_S = 5.0
"""Most seconds that a rank waits for rank 0 before it goes on with its own work, and connects in a thread."""
_AT_IMPORT_S = 15.0
"""The same at ``import panpipe``: nobody would see the end of a rank that dies before it is connected, and ranks that
import at the same time arrive seconds apart on a busy machine."""
_POLL_S = 0.05


class Meeting:
    """A rendezvous of all ranks.

    Args:
        timeout_s: the limit on waiting.
        armed: whether a failure of another rank ends this one; otherwise from `join` on.

    Attributes:
        rank, size: of the job.
        watch: of this rank; None until it is connected.
    """

    def __init__(self, timeout_s: float, armed: bool = True) -> None:
        self._own_store = not dist.is_initialized()
        if self._own_store:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self._address = store_address(self.rank, self.size)
        else:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout_s, self._armed = timeout_s, armed
        self._patience_s = _SOON_S if armed else _AT_IMPORT_S
        self._store: Any = None
        self._failure: Exception | None = None
        self._closed = self._met = False
        self._connected = threading.Event()
        self.watch: FailureWatch | None = None
        self._lost: WorkerError | None = None
        self._presence: Presence | None = None
        if self._own_store and not uses_agent_store():
            host, port = self._address
            self._presence = presence_of(f"{host}:{port}", self.rank, self.size)
        WHERE.install()
        print_uncaught_in_a_line(self.rank)
        self._thread = threading.Thread(target=self._connect, name="panpipe meeting", daemon=True)
        self._thread.start()
        if self._presence is not None:
            self._presence.follow(self._rank_ended)
        self._wait_for(self._connected.is_set)

    def _connect(self) -> None:
        try:
            with TORCH_LOG.without_warnings():
                self._meet()
        except PanpipeError as failure:
            self._failure = failure
        except RuntimeError:  # the store ended since this rank connected to it
            self._failure = self._lost = WorkerError(store_ended())
            if hosts_store(0):
                self._blame(0)
            self._end_if_lost()
        finally:
            self._connected.set()

    def _meet(self) -> None:
        """Connect to the job's store, and begin to watch it."""
        if self._own_store:
            store = _job_store(*self._address, self.rank, self.size, self._timeout_s)
        else:
            store = dist.distributed_c10d._get_default_store()
        # A process may build several pipelines. Their keys are apart, and the counter is the same on all ranks.
        number = store.add(f"panpipe/meetings/{self.rank}", 1)
        self._store = dist.distributed_c10d.PrefixStore(f"panpipe/meeting/{number}", store)
        self.watch = FailureWatch(
            self.rank, self.size, self._timeout_s, store=self._store, armed=self._armed, owns_keys=True,
            blame=self._blame,
        )  # fmt: skip
        if self.size > 1:
            self.watch.connect()
        if self._closed:
            self.watch.stop()
        self._end_if_lost()

    def await_others(self) -> None:
        """Wait a while for the connections to the other ranks, which would not see the end of this one before."""
        self._wait_for(lambda: self.watch is None or self.watch.connected)

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        """Wait a while, but not for ranks of which one has ended."""
        deadline = time.monotonic() + self._patience_s
        while not reached() and self._lost is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _rank_ended(self, rank: int) -> None:
        """Called in a thread when the process of a rank on this host has ended."""
        self._lost = WorkerError.stopped_answering([rank], "its process ended before all ranks had met")
        self._end_if_lost()

    def _end_if_lost(self) -> None:
        """End this rank if another one has ended, and this one waits for it or will."""
        if self._lost is None or not self._armed or self._closed or self._met:
            return
        if self.watch is not None:
            self.watch.report(self._lost)  # its thread ends this process, for the first reason of all
        elif self._failure in (None, self._lost):
            end_process(message_of(self._lost), self.rank)

    def _blame(self, rank: int) -> None:
        """Send to the ranks of this host which rank is the reason why this one ends."""
        if self._presence is not None:
            self._presence.blame(rank)

    def met(self) -> None:
        """Note that all ranks have arrived; from now on their connections show who ends."""
        self._met = True
        if self._presence is not None:
            self._presence.stop()

    def fail(self, failure: BaseException) -> None:
        """Report to all other ranks that this one stops, and why."""
        if self.watch is not None and not self.watch.reported:
            self.watch.report(failure)

    def arm(self, timeout_s: float) -> None:
        """From now on a failure of another rank ends this one.

        Args:
            timeout_s: the limit on waiting.
        """
        self._timeout_s, self._armed = timeout_s, True
        if self.watch is not None:
            self.watch.arm(timeout_s)
        self._end_if_lost()

    def store(self) -> Any:
        """The job's store, with the keys of this meeting; waits until this rank is connected.

        Raises:
            WorkerError: there is no store.
        """
        self._connected.wait()
        if self._failure is not None:
            raise self._failure
        if self.watch is not None:
            self.watch.arm(self._timeout_s)
        return self._store

    def leave(self, failure: BaseException | None = None) -> None:
        """Announce that this rank leaves, and why; further calls have no effect."""
        self._closed = True
        self._connected.wait(_SOON_S)
        if self.watch is not None:
            self.watch.stop(failure)


_early: list[Meeting] = []
"""The meeting that `begin_at_import` began, until it is used."""


def begin_meeting(timeout_s: float) -> Meeting:
    """The meeting that this process began when it imported panpipe, or a new one.

    Args:
        timeout_s: the limit on waiting.
    """
    if not _early:
        return Meeting(timeout_s)
    meeting = _early.pop()
    meeting.arm(timeout_s)
    return meeting


def begin_at_import() -> None:
    """Begin in a rank that was started by hand; errors are raised when the pipeline is built."""
    if not dist.is_available() or dist.is_initialized() or not begin_by_hand():
        return
    try:
        _early.append(Meeting(timeout_of(None), armed=False))
        _early[-1].await_others()
    except PanpipeError:
        return


def store_address(rank: int, size: int) -> tuple[str, int]:
    """Host and port of the job's store.

    Raises:
        RequestError: the environment has none.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise RequestError(
            f"this is rank {rank} of {size} and MASTER_ADDR:MASTER_PORT is '{address or ''}:{port}': they must be the "
            "host and port of the job's store; start the script with torchrun, which sets them"
        )
    return address, int(port)


def _job_store(address: str, port: int, rank: int, size: int, timeout_s: float) -> Any:
    """The job's store, as ``env://`` creates it, but without its unlimited wait for all ranks."""
    # Builds of PyTorch without torch.distributed have none.
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    hosting = rank == 0 and not uses_agent_store()
    listening = listen_for_store(address, port) if hosting else None
    given: dict[str, Any] = {} if listening is None else {"master_listen_fd": listening.detach()}
    try:
        # Several tenants: the user's own process group may use this store, too.
        store = TCPStore(
            address, port, size, hosting, timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True,
            **given,
        )  # fmt: skip
    except RuntimeError as error:
        who = "the process that started the job" if uses_agent_store() else "rank 0"
        raise WorkerError(
            f"{who} did not arrive within {timeout_s:g} s: there is no store of the job at {address}:{port}, where "
            f"rank {rank} of {size} waited; start {who}, or see why it stopped"
        ) from error
    # torchrun's store outlives a restart of the ranks, and still has the reason of the last failure.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"/worker/attempt_{attempt}", store) if uses_agent_store() else store
