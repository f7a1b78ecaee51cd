"""A device: one in-order queue of operations, each waiting for what it reads and for nothing else."""

from collections.abc import Callable, Sequence

from simpy import Environment, Event
from simpy.events import Timeout


class DeviceQueue:
    """A device's compute queue. One SimPy event for an operation: its end.

    Args:
        environment: SimPy's.
        seconds: duration of every operation.

    Attributes:
        pending: per operation how many messages and reductions it still waits for.
        between: per operation what the device issues in front of it, none of which it waits for; one more entry for
            what stands behind the last.
        starts, ends: times of the operations that have started and ended.
    """

    __slots__ = ("_on_end", "between", "ends", "environment", "idle", "pending", "position", "seconds", "starts")

    def __init__(self, environment: Environment, seconds: Sequence[float]) -> None:
        self.environment = environment
        self.seconds = seconds
        self.pending = [0] * len(seconds)
        self.between: list[list[Callable[[], None]]] = [[] for _ in range(len(seconds) + 1)]
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.position = 0
        self.idle = True
        self._on_end = self._end

    @property
    def done(self) -> bool:
        """Whether every operation has ended."""
        return self.position == len(self.seconds)

    def begin(self) -> None:
        """Issue what stands in front of the first operation, and start it if it may."""
        self._issue_and_start()

    def close(self) -> None:
        """Let go of what it issues, so that everything is freed at once."""
        self.between.clear()
        del self._on_end

    def arrived(self, operation: int) -> None:
        """One of the things that an operation waits for is there."""
        self.pending[operation] -= 1
        if operation == self.position and self.idle and not self.pending[operation]:
            self._start()

    def _start(self) -> None:
        self.idle = False
        environment = self.environment
        self.starts.append(environment.now)
        Timeout(environment, self.seconds[self.position]).callbacks.append(self._on_end)

    def _end(self, _: Event) -> None:
        self.ends.append(self.environment.now)
        self.position += 1
        self.idle = True
        self._issue_and_start()

    def _issue_and_start(self) -> None:
        position = self.position
        for issue in self.between[position]:
            issue()
        # A message of no delay cannot have started it meanwhile: arrivals are events, and come later.
        if position < len(self.pending) and not self.pending[position]:
            self._start()
