"""The rendezvous of all ranks before they begin; ranks that do not arrive in time are named.

join: all have arrived, or the missing ones are named ──▶ create_group: the job's process group, if there is none
"""

import sys
import time
from typing import Any

import torch.distributed as dist

from ...backends.gloo import ENDLESS
from ...core.errors import WorkerError
from ..watch.activity import HERE
from ..watch.lost_ranks import acknowledge, hosts_store, left_early, linger, not_arrived
from ..watch.published_positions import PublishedPositions
from ..watch.torch_log import TORCH_LOG
from ..watch.uncaught import keep_one_prefix
from ..watch.watch import FAILURE_KEY
from .meeting import Meeting

_POLL_S = 0.1


def join(meeting: Meeting, timeout_s: float) -> None:
    """Wait for every rank of the job.

    Args:
        meeting: of these ranks.
        timeout_s: most seconds to wait.

    Raises:
        WorkerError: a rank did not arrive; the message names it.
    """
    rank, size = meeting.rank, meeting.size
    others = tuple(other for other in range(size) if other != rank)
    with HERE.waiting(others, "the arrival of all ranks"), TORCH_LOG.without_warnings():
        store = meeting.store()
        _meet(store, rank, size, timeout_s)


def create_group(meeting: Meeting) -> None:
    """Create the default process group if there is none; all ranks call this together, after `join`.

    Raises:
        RuntimeError: a rank ended meanwhile; torch does not report which.
    """
    if not dist.is_initialized():
        # Without a prefix, a later group in the same store would read an earlier one's addresses.
        own = dist.distributed_c10d.PrefixStore("group", meeting.store())
        before = sys.excepthook
        dist.init_process_group("gloo", store=own, rank=meeting.rank, world_size=meeting.size, timeout=ENDLESS)
        keep_one_prefix(before)
        meeting.founded()


def _meet(store: Any, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all ranks are here. One that has left, or is not connected in time, is reported to all.

    One that is connected has published its position: whether it hangs is decided by the watch, with what it does.
    """
    deadline, published = time.monotonic() + timeout_s, PublishedPositions(rank, size, timeout_s)
    try:
        keys = [f"arrived/{other}" for other in range(size)]
        store.set(keys[rank], "")
        while not store.check(keys):
            if store.check([FAILURE_KEY]):
                acknowledge(store, rank)
                raise WorkerError(store.get(FAILURE_KEY).decode())
            missing = [other for other in range(size) if not store.check([keys[other]])]
            left = published.left(store, missing)
            absent = published.absent(store, missing) if time.monotonic() > deadline else []
            if left or absent:
                why = left_early(left, rank, "at the start") if left else not_arrived(absent, size, timeout_s)
                reason = store.compare_set(FAILURE_KEY, "", why).decode()
                acknowledge(store, rank)
                if hosts_store(rank):
                    linger(store, set(range(size)).difference(published.absent(store, missing)))
                raise WorkerError(reason)
            time.sleep(_POLL_S)
    except RuntimeError as error:
        raise WorkerError.stopped_answering([0], f"before all of the {size} ranks had arrived: {error}") from error
