"""Ranks meet before they begin, and name the one that does not come."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...core.errors import RequestError, WorkerError
from .watch import FAILURE_KEY, acknowledge, hosts_store, linger, numbered, uses_agent_store

ARRIVAL_S = 300.0
"""How long ranks wait for each other: one may still be reading its model while another has captured it."""
_POLL_S = 0.1


def join(timeout_s: float) -> None:
    """Wait until every rank of the job is here, and make the default process group where there is none.

    Args:
        timeout_s: how long.

    Raises:
        WorkerError: a rank did not come; the message names it.
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        _meet(dist.distributed_c10d._get_default_store(), rank, size, timeout_s)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, size, timeout_s)
    meeting = _meet(store, rank, size, timeout_s)
    # Groups that come and go in one store would read each other's addresses.
    own = dist.distributed_c10d.PrefixStore(meeting, store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size)


def _store(rank: int, size: int, timeout_s: float) -> Any:
    """The job's store, as ``env://`` makes it, but without its unlimited wait for everybody."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise RequestError(
            f"this is rank {rank} of {size} and MASTER_ADDR:MASTER_PORT is '{address or ''}:{port}': a host and a port "
            "where the ranks meet; start the script with torchrun, which sets them"
        )
    # Builds of PyTorch without torch.distributed have none.
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    hosting = rank == 0 and not uses_agent_store()
    try:
        store = TCPStore(
            address, int(port), size, hosting, timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        who = "the process that started the job" if uses_agent_store() else "rank 0"
        raise WorkerError(
            f"{who} did not arrive within {timeout_s:g} s: nobody keeps the job's store at {address}:{port}, where "
            f"rank {rank} of {size} waited; start {who}, or see why it stopped"
        ) from error
    # torchrun's store outlives ranks that it starts again, and has why they stopped the last time.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"/worker/attempt_{attempt}", store) if uses_agent_store() else store


def _meet(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """Wait for all ranks; the name of this meeting in the store, the same on all of them."""
    deadline = time.monotonic() + timeout_s
    try:
        # A store counts its own meetings: a process may be in groups, each with a store, that others are not in.
        meeting = f"panpipe/arrived/{store.add(f'panpipe/meetings/{rank}', 1)}"
        keys = [f"{meeting}/{other}" for other in range(size)]
        store.set(keys[rank], "")
        while not store.check(keys):
            if store.check([FAILURE_KEY]):
                acknowledge(store, rank)
                raise WorkerError(store.get(FAILURE_KEY).decode())
            if time.monotonic() > deadline:
                missing = [other for other in range(size) if not store.check([keys[other]])]
                reason = store.compare_set(FAILURE_KEY, "", _absent(missing, size, timeout_s)).decode()
                acknowledge(store, rank)
                if hosts_store(rank):
                    linger(store, set(range(size)).difference(missing))
                raise WorkerError(reason)
            time.sleep(_POLL_S)
        return meeting
    except RuntimeError as error:
        raise WorkerError(f"rank 0 stopped answering before all of the {size} ranks had arrived: {error}") from error


def _absent(missing: Sequence[int], size: int, timeout_s: float) -> str:
    return (
        f"{numbered(missing)} of {size} did not arrive within {timeout_s:g} s: every rank calls panpipe.pipeline with "
        "the same arguments; see what it does, or why it stopped"
    )
