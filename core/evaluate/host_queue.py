"""The host-copy queues of one device while its compute order runs: when copies end, and which bytes are on the host.

The rules are those of ``plan/host_copies``: a copy out is issued by the end of F, and ``freed_at`` waits for it; a
reload is issued by the end of ``reload_after``, and the backward waits for it. The copies of a queue run one after
another in the order of issue. Of those issued at the same position, reloads are first, in the order in which they are
read.
"""

from collections.abc import Sequence
from typing import NamedTuple


class TimedCopy(NamedTuple):
    """The copies of one microbatch's storages to the host and back, by positions in the device's compute order.

    Args:
        forward: position of the F, whose end issues the copy to the host.
        freed_at: position of the action that waits for that copy.
        reload_after: position of the action whose end issues the copy back.
        reader: position of the B or I that waits for the copy back.
        out_s, back_s: seconds of the two copies on idle links.
        bytes: size of the storages.
    """

    forward: int
    freed_at: int
    reload_after: int
    reader: int
    out_s: float
    back_s: float
    bytes: float


class HostQueue:
    """Runs the copies of a device concurrently with its compute order.

    Args:
        copies: in any order.
        queues: 1 for both directions, or 2, one for each.
    """

    def __init__(self, copies: Sequence[TimedCopy], queues: int = 1) -> None:
        self._copies = copies
        self._free = [0.0] * queues
        self._ends = [[0.0, 0.0] for _ in copies]  # of the copy out and of the copy back
        self._awaited: dict[int, list[tuple[int, int]]] = {}
        issued: dict[int, list[tuple[bool, int, int]]] = {}
        for number, copy in enumerate(copies):
            self._awaited.setdefault(copy.freed_at, []).append((number, 0))
            self._awaited.setdefault(copy.reader, []).append((number, 1))
            issued.setdefault(copy.forward, []).append((True, copy.freed_at, number))
            issued.setdefault(copy.reload_after, []).append((False, copy.reader, number))
        self._issued = {position: sorted(found) for position, found in issued.items()}

    @property
    def ends(self) -> Sequence[Sequence[float]]:
        """Per copy when it ends on the host, and when it ends back on the device."""
        return self._ends

    def ready_s(self, position: int) -> float:
        """When all copies have ended that the action at a position waits for."""
        return max((self._ends[number][way] for number, way in self._awaited.get(position, ())), default=0.0)

    def issue(self, position: int, end_s: float) -> None:
        """Run the copies that the end of the action at a position issues."""
        for out, _, number in self._issued.get(position, ()):
            copy, ends = self._copies[number], self._ends[number]
            queue = 0 if out else -1
            if out:
                ends[0] = self._free[queue] = max(self._free[queue], end_s) + copy.out_s
            else:
                ends[1] = self._free[queue] = max(self._free[queue], end_s, ends[0]) + copy.back_s


def bytes_off_device(copies: Sequence[TimedCopy], actions: int) -> list[tuple[float, float]]:
    """Bytes that are not on the device while each action of an order runs, and directly after it.

    Args:
        copies: of the device.
        actions: length of its compute order.
    """
    running, after = [0.0] * (actions + 1), [0.0] * (actions + 1)
    for copy in copies:
        running[copy.freed_at] += copy.bytes
        running[copy.reload_after + 1] -= copy.bytes
        after[copy.freed_at] += copy.bytes
        after[copy.reload_after] -= copy.bytes
    result, off_device, left = [], 0.0, 0.0
    for change, later in zip(running[:actions], after[:actions], strict=True):
        off_device += change
        left += later
        result.append((off_device, left))
    return result
