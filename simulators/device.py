"""A device: one in-order queue of operations, each of which waits only for its inputs."""

from collections.abc import Callable, Sequence

from simpy import Environment, Event
from simpy.events import Timeout


class DeviceQueue:
    """A device's compute queue. An operation costs one SimPy event: its end.

    Args:
        seconds: duration of every operation; without that of its flow.

    Attributes:
        flows: per operation a function that starts its flow over links, after which it ends; None for no flow. Empty if
            no operation has one.
        pending: per operation how many messages and reductions it still waits for.
        between: per operation the calls that issue other work before it, without waiting for that; one more entry for
            work after the last operation.
        starts, ends: times of the operations that have started and ended.
    """

    __slots__ = (
        "_on_end", "between", "ends", "environment", "flows", "idle", "pending", "position", "seconds", "starts",
    )  # fmt: skip

    def __init__(self, environment: Environment, seconds: Sequence[float]) -> None:
        self.environment = environment
        self.seconds = seconds
        self.pending = [0] * len(seconds)
        self.between: list[list[Callable[[], None]]] = [[] for _ in range(len(seconds) + 1)]
        self.flows: list[Callable[[], None] | None] = []
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
        """Issue the work before the first operation, and start the operation if its inputs are there."""
        self._issue_and_start()

    def close(self) -> None:
        """Drop all references, so that everything is freed at once."""
        self.between.clear()
        self.flows.clear()
        del self._on_end

    def arrived(self, operation: int) -> None:
        """One input of an operation has arrived."""
        self.pending[operation] -= 1
        if operation == self.position and self.idle and not self.pending[operation]:
            self._start()

    def _start(self) -> None:
        self.idle = False
        environment = self.environment
        self.starts.append(environment.now)
        Timeout(environment, self.seconds[self.position]).callbacks.append(self._on_end)

    def _end(self, _: Event) -> None:
        flow = self.flows[self.position] if self.flows else None
        if flow is None:
            self.finish()
        else:
            flow()

    def finish(self) -> None:
        """The operation has ended, with its flow."""
        self.ends.append(self.environment.now)
        self.position += 1
        self.idle = True
        self._issue_and_start()

    def _issue_and_start(self) -> None:
        position = self.position
        for issue in self.between[position]:
            issue()
        # A message without delay cannot have started it meanwhile: arrivals are later events.
        if position < len(self.pending) and not self.pending[position]:
            self._start()
