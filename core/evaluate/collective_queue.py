"""The collectives of a device over its replicas, while its compute order runs: one after another, in the order issued.

The next backward of the same stage waits for a SCATTER_GRAD, and the first action of a run for its UNSHARD. It is the
counterpart of ``plan/gradient_reduction`` for one replica: all replicas are taken to issue at the same time.
"""

from collections.abc import Callable, Iterable, Sequence

from ..actions import AT_START, LAST_BACKWARD, Action, Kind


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
