"""The rendezvous of all ranks before they begin; ranks that do not arrive in time are named."""

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...backends.gloo import ENDLESS
from ...core.errors import RequestError, WorkerError
from .activity import HERE
from .address import listen_for_store
from .lost_ranks import hosts_store, not_arrived, uses_agent_store
from .watch import FAILURE_KEY, acknowledge, linger

_POLL_S = 0.1


def join(timeout_s: float) -> str:
    """Wait for every rank of the job, and create the default process group if there is none.

    Args:
        timeout_s: most seconds to wait.

    Returns:
        The name of this meeting in the store, the same on all ranks.

    Raises:
        WorkerError: a rank did not arrive; the message names it.
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        return _meet(dist.distributed_c10d._get_default_store(), rank, size, timeout_s)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, size, timeout_s)
    meeting = _meet(store, rank, size, timeout_s)
    # Without a prefix, a later group in the same store would read an earlier one's addresses.
    own = dist.distributed_c10d.PrefixStore(meeting, store)
    with HERE.waiting(tuple(other for other in range(size) if other != rank), "the connection of the ranks"):
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=ENDLESS)
    return meeting


def _store(rank: int, size: int, timeout_s: float) -> Any:
    """The job's store, as ``env://`` creates it, but without its unlimited wait for all ranks."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise RequestError(
            f"this is rank {rank} of {size} and MASTER_ADDR:MASTER_PORT is '{address or ''}:{port}': they must be the "
            "host and port of the job's store; start the script with torchrun, which sets them"
        )
    # Builds of PyTorch without torch.distributed have none.
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    hosting = rank == 0 and not uses_agent_store()
    listening = listen_for_store(address, int(port)) if hosting else None
    given = {} if listening is None else {"master_listen_fd": listening.detach()}
    try:
        # Several tenants: the user's own process group may use this store, too.
        store = TCPStore(
            address, int(port), size, hosting, timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True,
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


def _meet(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """Wait for all ranks; returns the name of this rendezvous in the store, the same on all of them."""
    deadline = time.monotonic() + timeout_s
    try:
        # The counter is in the store: a process may be in several groups, each with its own store and other members.
        meeting = f"panpipe/arrived/{store.add(f'panpipe/meetings/{rank}', 1)}"
        keys = [f"{meeting}/{other}" for other in range(size)]
        store.set(keys[rank], "")
        while not store.check(keys):
            if store.check([FAILURE_KEY]):
                acknowledge(store, rank)
                raise WorkerError(store.get(FAILURE_KEY).decode())
            if time.monotonic() > deadline:
                missing = [other for other in range(size) if not store.check([keys[other]])]
                reason = store.compare_set(FAILURE_KEY, "", not_arrived(missing, size, timeout_s)).decode()
                acknowledge(store, rank)
                if hosts_store(rank):
                    linger(store, set(range(size)).difference(missing))
                raise WorkerError(reason)
            time.sleep(_POLL_S)
        return meeting
    except RuntimeError as error:
        raise WorkerError.stopped_answering([0], f"before all of the {size} ranks had arrived: {error}") from error
