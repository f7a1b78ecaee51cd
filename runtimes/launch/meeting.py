"""The rendezvous of all ranks at the start of ``panpipe.pipeline``; ranks that do not arrive in time are named.

    connected to the job's store ──▶ all have arrived, or the missing ones are named ──▶ watched ──▶ capture

The death of a rank before that is torchrun's to report; without it, the others wait for the limit.
"""

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...backends.gloo import ENDLESS
from ...core.errors import RequestError, WorkerError
from ..watch.activity import HERE
from ..watch.positions import Position, named
from ..watch.process import WHERE, print_uncaught_in_a_line, process_here, without_torch_warnings
from ..watch.watch import FAILURE_KEY, FailureWatch, hosts_store, position_key, store_ended, uses_agent_store


class Meeting:
    """A rendezvous of all ranks; all create it together.

    Attributes:
        rank, size: of the job.
        store: the job's, with the keys of this meeting.
        watch: of this rank.

    Raises:
        WorkerError: a rank did not arrive; the message names it.
    """

    def __init__(self, timeout_s: float) -> None:
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        else:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        others = tuple(other for other in range(self.size) if other != self.rank)
        WHERE.install()
        print_uncaught_in_a_line(self.rank)
        with HERE.waiting(others, "the arrival of all ranks"), without_torch_warnings():
            try:
                if dist.is_initialized():
                    store = dist.distributed_c10d._get_default_store()
                else:
                    store = _job_store(self.rank, self.size, timeout_s)
                # A process may build several pipelines. Their keys are apart, and the counter is the same on all ranks.
                number = store.add(f"panpipe/meetings/{self.rank}", 1)
                self.store: Any = dist.distributed_c10d.PrefixStore(f"panpipe/meeting/{number}", store)
                meet(self.store, self.rank, self.size, timeout_s)
                self.watch = FailureWatch(self.store, self.rank, self.size, timeout_s)
            except RuntimeError as error:
                raise WorkerError(f"{store_ended()}, before all of the {self.size} ranks had arrived") from error

    def create_group(self) -> None:
        """Create the default process group if there is none; all ranks call this together.

        Raises:
            RuntimeError: a rank ended meanwhile; torch does not report which.
        """
        if not dist.is_initialized():
            # Without a prefix, a later group in the same store would read an earlier one's addresses.
            own = dist.distributed_c10d.PrefixStore("group", self.store)
            dist.init_process_group("gloo", store=own, rank=self.rank, world_size=self.size, timeout=ENDLESS)


def meet(store: Any, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all ranks are here; the missing ones are reported to all after the limit."""
    deadline = time.monotonic() + timeout_s
    keys = {other: position_key(other) for other in range(size)}
    store.set(keys[rank], Position(HERE.text(), process=process_here()).document(0))
    while not store.check(list(keys.values())):
        late = time.monotonic() > deadline
        if late:
            missing = [other for other, key in keys.items() if not store.check([key])]
            reason = (
                f"{named(missing)} of {size} did not arrive within {timeout_s:g} s: every rank must call "
                "panpipe.pipeline with the same arguments; see what it does, or why it stopped"
            )
            store.compare_set(FAILURE_KEY, "", reason)
        if late or store.check([FAILURE_KEY]):
            reason = store.get(FAILURE_KEY).decode()
            if hosts_store(rank):
                time.sleep(1.0)  # the others read the reason
            raise WorkerError(reason)
        time.sleep(0.1)


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


def _job_store(rank: int, size: int, timeout_s: float) -> Any:
    """The job's store, as ``env://`` creates it, but without its unlimited wait for all ranks."""
    # Builds of PyTorch without torch.distributed have none.
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = store_address(rank, size)
    try:
        # Several tenants: the user's own process group may use this store, too.
        store = TCPStore(
            address, port, size, hosts_store(rank), timedelta(seconds=timeout_s), wait_for_workers=False,
            multi_tenant=True,
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
