"""The queues of one device that run concurrently with its compute order: host copies, and collectives over its
replicas.

Host copies follow the rules of ``plan/host_copies``: a copy out is issued by the end of F, and ``freed_at`` waits for
it; a reload is issued by the end of ``reload_after``, and the backward waits for it. The copies of a queue run one
after another in the order of issue. Of those issued at the same position, reloads are first, in the order in which
they are read.

Collectives run one after another, in the order issued. The next backward of the same stage waits for a SCATTER_GRAD,
and the first action of a run for its UNSHARD. It is the counterpart of ``plan/gradient_reduction`` for one replica:
all replicas are taken to issue at the same time.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..actions import AT_START, LAST_BACKWARD, Action, Kind
from ..costs.costs import StageCosts
from ..plan.memory import held_bytes


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


def device_bytes(
    actions: Sequence[Action],
    costs: Sequence[StageCosts],
    recompute: Collection[int] = (),
    copies: Sequence[TimedCopy] = (),
) -> Iterator[tuple[float, float]]:
    """The saved tensors that a device holds while each of its actions runs, and after it, in bytes.

    Args:
        actions: the device's compute order.
        costs: per stage.
        recompute: the stages that recompute.
        copies: of the device to the host; what they copy is counted while it is on the device.
    """
    held = held_bytes(actions, costs, recompute)
    if not copies:
        return held
    away = bytes_off_device(copies, len(actions))
    return ((now - gone, after - left) for (now, after), (gone, left) in zip(held, away, strict=True))


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


class CollectiveQueue:
    """Runs the collectives of a device concurrently with its compute order.

    Args:
        actions: the compute order.
        collectives: of the device, in order, each with the position that it follows; see ``plan/gradient_reduction``.
        seconds: duration of one of them.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        collectives: Iterable[tuple[int, Action]],
        seconds: Callable[[Action], float],
    ) -> None:
        self._issued: dict[int, list[tuple[Action, float]]] = {}
        self._awaited: dict[int, list[Action]] = {}
        self._ends: dict[Action, float] = {}
        self._free = 0.0
        for at, action in collectives:
            self._issued.setdefault(at, []).append((action, seconds(action)))
            readers = LAST_BACKWARD if action.kind is Kind.SCATTER_GRAD else None
            if action.kind in (Kind.SCATTER_GRAD, Kind.UNSHARD):
                later = range(at + 1, len(actions))
                own = (i for i in later if actions[i].stage == action.stage)
                reader = next((i for i in own if readers is None or actions[i].kind in readers), None)
                if reader is not None:
                    self._awaited.setdefault(reader, []).append(action)
        self.issue(AT_START, 0.0)

    def ready_s(self, position: int) -> float:
        """When everything has ended that the action at a position waits for."""
        return max((self._ends[action] for action in self._awaited.get(position, ())), default=0.0)

    def issue(self, position: int, end_s: float) -> None:
        """Run the collectives that the end of the action at a position issues."""
        for action, seconds in self._issued.get(position, ()):
            self._ends[action] = self._free = max(self._free, end_s) + seconds
