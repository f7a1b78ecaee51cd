"""A device: one in-order queue of operations, each of which waits only for its inputs."""

from collections.abc import Callable, Sequence

from attrs import define, field
from simpy import Environment, Event
from simpy.events import Timeout


@define(eq=False)
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

    _environment: Environment
    seconds: Sequence[float]
    pending: list[int] = field(init=False)
    between: list[list[Callable[[], None]]] = field(init=False)
    flows: list[Callable[[], None] | None] = field(factory=list, init=False)
    starts: list[float] = field(factory=list, init=False)
    ends: list[float] = field(factory=list, init=False)
    position: int = field(default=0, init=False)
    _idle: bool = field(default=True, init=False)
    _on_end: Callable[[Event], None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pending = [0] * len(self.seconds)
        self.between = [[] for _ in range(len(self.seconds) + 1)]
        self._on_end = self._end

    @property
    def done(self) -> bool:
        """Whether every operation has ended."""
        return self.position == len(self.seconds)

    def close(self) -> None:
        """Drop all references."""
        self.between.clear()
        self.flows.clear()
        del self._on_end

    def arrived(self, operation: int) -> None:
        """One input of an operation has arrived."""
        self.pending[operation] -= 1
        if operation == self.position and self._idle and not self.pending[operation]:
            self._start()

    def _start(self) -> None:
        self._idle = False
        environment = self._environment
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
        self.ends.append(self._environment.now)
        self.position += 1
        self._idle = True
        self.begin()

    def begin(self) -> None:
        """Issue the work before the next operation, and start the operation if its inputs are there."""
        position = self.position
        for issue in self.between[position]:
            issue()
        # A message without delay cannot have started it meanwhile: arrivals are later events.
        if position < len(self.pending) and not self.pending[position]:
            self._start()
