"""The sums of microbatches' gradients over replicas (SCATTER_GRAD), while a device's compute order runs: one after
another, in the order issued; the next backward of the same stage waits for each.

It is the counterpart of ``plan/gradient_reduction`` for one replica: all replicas are taken to issue at the same time.
"""

from collections.abc import Callable, Iterable

from ..actions import Action, Kind


class CollectiveQueue:
    """Runs the sums of a device concurrently with its compute order.

    Args:
        collectives: the device's actions on the collective queue, each with the position of the backward it follows;
            see ``plan/gradient_reduction``.
        scatter_s: stage → seconds of a sum over its replicas.
    """

    def __init__(self, collectives: Iterable[tuple[int, Action]], scatter_s: Callable[[int], float]) -> None:
        self._seconds: dict[int, float] = {}
        self._awaited: dict[int, int] = {}  # position of a backward → that of the one before it
        self._ends: dict[int, float] = {}
        self._free = 0.0
        last: dict[int, int] = {}
        for at, action in collectives:
            if action.kind is Kind.SCATTER_GRAD:
                self._seconds[at] = scatter_s(action.stage)
                if action.stage in last:
                    self._awaited[at] = last[action.stage]
                last[action.stage] = at

    def ready_s(self, position: int) -> float:
        """When the sum has ended that the action at a position waits for."""
        return self._ends[self._awaited[position]] if position in self._awaited else 0.0

    def issue(self, position: int, end_s: float) -> None:
        """Run the sum that the end of the action at a position issues."""
        if position in self._seconds:
            self._ends[position] = self._free = max(self._free, end_s) + self._seconds[position]
