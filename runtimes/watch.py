"""When one rank stops, all stop, within seconds, with the name of that rank and its reason.

A rank that fails writes its reason to the job's store before it goes; a rank that is killed is missed by those who talk
to it, and they write that. Every rank looks there twice a second: its main thread may be waiting in a transfer that
nothing else can interrupt.
"""

import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from ..core.errors import WorkerError

FAILURE_KEY = "panpipe/failure"
"""Where the job's store has the reason why all stop."""
_POLL_S = 0.5
LINGER_S = 2 * _POLL_S
"""How long the rank that keeps the store stays when it fails, so that the others can read why."""
_GRACE_S = 3.0
"""How long a rank that saw a peer's failure may take to raise it from its main thread."""
_STORE_GONE = {
    False: "rank 0 stopped: the job's store, which it keeps, is gone",
    True: "the process that started the job stopped: its store is gone",
}


def uses_agent_store() -> bool:
    """Whether ``torchrun`` keeps the job's store; rank 0 does otherwise."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def hosts_store(rank: int) -> bool:
    """Whether the job's store ends with this rank."""
    return rank == 0 and not uses_agent_store()


class FailureWatch:
    """Watches the job's store for failures from a thread.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        default = dist.distributed_c10d._get_default_store()
        # A connection of its own: the main thread may hold the shared one.
        self._store = default.clone() if hasattr(default, "clone") else default
        self._store.set_timeout(timedelta(seconds=5))
        self._stopped = threading.Event()
        self._reported = False
        self._thread = threading.Thread(target=self._look, name="panpipe failure watch", daemon=True)
        self._thread.start()

    def report(self, failure: BaseException) -> str:
        """Tell the others why this rank stops, and return why all of them do: the first reason counts.

        A rank that missed a killed one stops too, and may be gone before its other neighbours look: they miss it, and
        learn here whom it had missed.
        """
        self._reported = True
        if isinstance(failure, WorkerError):
            reason = str(failure)
        else:
            reason = f"rank {self._rank} stopped: {type(failure).__name__}: {failure}"
        try:
            first: str = self._store.compare_set(FAILURE_KEY, "", reason).decode()
        except RuntimeError:
            return _STORE_GONE[uses_agent_store()]
        if hosts_store(self._rank):
            time.sleep(LINGER_S)
        return first

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopped.wait(_POLL_S):
            try:
                if not self._store.check([FAILURE_KEY]):
                    continue
                reason = self._store.get(FAILURE_KEY).decode()
            except RuntimeError:
                if self._stopped.is_set():
                    return
                reason = _STORE_GONE[uses_agent_store()]
            if self._stopped.wait(_GRACE_S if self._reported else LINGER_S if hosts_store(self._rank) else 0):
                return
            sys.stderr.write(f"panpipe: {reason}; rank {self._rank} stops too\n")
            sys.stderr.flush()
            os._exit(1)
