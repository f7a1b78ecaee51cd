"""The processes of the ranks of this host: the end of one is seen at once, also while nobody sends it a message.

A transport detects a killed rank at most when another rank communicates with it, and not every transport does: NCCL's
kernels wait on the GPU for a counterpart that never comes. So the ranks of a host write their process numbers to the
job's store, and each opens the others' (``pidfd_open``, Linux): the kernel reports the end of a process, and a slow or
stopped one has not ended. The ranks of other hosts are ended by ``torchrun``'s agents, or named after the limit.
"""

import os
import select
from contextlib import suppress
from pathlib import Path

from .job_store import JobStore


class Processes:
    """The processes of the other ranks of this host.

    Args:
        store: the job's.
        rank: this rank.
    """

    def __init__(self, store: JobStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._key = f"panpipe/processes/{_host()}"
        self._open: dict[int, int] = {}
        self._known = {rank}
        self._poll = select.poll()
        store.append(self._key, f"{rank} {os.getpid()}\n")

    def ended(self) -> list[int]:
        """The ranks whose processes have ended since the last call, in order or not."""
        found = []
        for line in self._store.get(self._key).decode().splitlines():
            rank, number = map(int, line.split())
            if rank not in self._known:
                self._known.add(rank)
                try:
                    descriptor = os.pidfd_open(number)
                except ProcessLookupError:
                    found.append(rank)
                except (OSError, AttributeError):  # a system without it
                    pass
                else:
                    self._open[descriptor] = rank
                    self._poll.register(descriptor, select.POLLIN)
        for descriptor, _ in self._poll.poll(0):
            found.append(self._open.pop(descriptor))
            self._poll.unregister(descriptor)
            os.close(descriptor)
        return found

    def close(self) -> None:
        """Close the descriptors."""
        while self._open:
            os.close(self._open.popitem()[0])


def _host() -> str:
    """This host's boot, and the namespace in which process numbers count."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return "unknown"
