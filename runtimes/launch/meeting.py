"""Connects a rank to the job's store and watches it as early as possible, before all ranks have arrived.

A rank may die while it captures, long before it waits for others. So that the others notice, it connects as soon as
``panpipe.pipeline`` is called, and then continues with its work::

    pipeline() ──▶ connected to rank 0, watched ──▶ capture ──▶ waits for all (`arrival`)

The death of a rank that was never connected is torchrun's to report; without it, the others wait for the limit.
"""

import os
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...core.errors import PanpipeError, RequestError, WorkerError
from ..watch.address import listen_for_store
from ..watch.lost_ranks import store_ended, uses_agent_store
from ..watch.signals import WHERE
from ..watch.torch_log import TORCH_LOG
from ..watch.uncaught import print_uncaught_in_a_line
from ..watch.watch import FailureWatch

_SOON_S = 5.0
"""Most seconds that a rank waits for rank 0 before it goes on with its own work, and connects in a thread."""
_FOUNDED = list[tuple[Any, Any]]()
"""The default process group's store and the job's store that it was made from, if a meeting made the group."""


class Meeting:
    """A rendezvous of all ranks.

    Args:
        timeout_s: the limit on waiting.

    Attributes:
        rank, size: of the job.
        watch: of this rank; None until it is connected.
    """

    def __init__(self, timeout_s: float) -> None:
        self._own_store = not dist.is_initialized()
        if self._own_store:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self._address = store_address(self.rank, self.size)
        else:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout_s = timeout_s
        self._store: Any = None
        self._job: Any = None
        self._failure: Exception | None = None
        self._closed = False
        self._connected = threading.Event()
        self.watch: FailureWatch | None = None
        WHERE.install()
        print_uncaught_in_a_line(self.rank)
        self._thread = threading.Thread(target=self._connect, name="panpipe meeting", daemon=True)
        self._thread.start()
        self._connected.wait(_SOON_S)

    def _connect(self) -> None:
        try:
            with TORCH_LOG.without_warnings():
                self._meet()
        except PanpipeError as failure:
            self._failure = failure
        except RuntimeError:  # the store ended since this rank connected to it
            self._failure = WorkerError(store_ended())
        finally:
            self._connected.set()

    def _meet(self) -> None:
        """Connect to the job's store, and begin to watch it."""
        if self._own_store:
            store = _job_store(*self._address, self.rank, self.size, self._timeout_s)
        else:
            # Not in the group's own part, which the meeting that made the group removes when it ends.
            default = dist.distributed_c10d._get_default_store()
            store = next((job for group, job in _FOUNDED if group is default), default)
        self._job = store
        # A process may build several pipelines. Their keys are apart, and the counter is the same on all ranks.
        number = store.add(f"panpipe/meetings/{self.rank}", 1)
        self._store = dist.distributed_c10d.PrefixStore(f"panpipe/meeting/{number}", store)
        self.watch = FailureWatch(self.rank, self.size, self._timeout_s, store=self._store, owns_keys=True)
        if self._closed:
            self.watch.stop()

    def founded(self) -> None:
        """Note that the default process group has been made from this meeting's store."""
        _FOUNDED[:] = [(dist.distributed_c10d._get_default_store(), self._job)]

    def fail(self, failure: BaseException) -> None:
        """Report to all other ranks that this one stops, and why."""
        if self.watch is not None and not self.watch.reported:
            self.watch.report(failure)

    def store(self) -> Any:
        """The job's store, with the keys of this meeting; waits until this rank is connected.

        Raises:
            WorkerError: there is no store.
        """
        self._connected.wait()
        if self._failure is not None:
            raise self._failure
        return self._store

    def leave(self, failure: BaseException | None = None) -> None:
        """Announce that this rank leaves, and why; further calls have no effect."""
        self._closed = True
        self._connected.wait(_SOON_S)
        if self.watch is not None:
            self.watch.stop(failure)


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
