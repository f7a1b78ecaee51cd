"""The reduction of a tied weight's gradient: a rendezvous of the stages that hold a replica of it."""

from collections.abc import Callable, Iterable, Mapping

from simpy import Environment, Event
from simpy.events import Timeout

from ..core.cluster import Cluster
from ..core.plan import TiedWeight
from .device import DeviceQueue


class TiedReduction:
    """One tied weight.

    Starts when the last of its stages has joined and takes as long as the slowest transfer of its gradient between two
    of their devices, on free links.

    Args:
        environment: SimPy's.
        weight: which.
        seconds: how long it takes.
        readers: per stage the rank of its device, the queue of that, and the operation that waits: its STEP.

    Attributes:
        on_end: called when the sum is there.
        joined_s: when each stage joined.
        start_s, end_s: when all had joined, and when the sum was there.
    """

    def __init__(
        self,
        environment: Environment,
        weight: TiedWeight,
        seconds: float,
        readers: Mapping[int, tuple[int, DeviceQueue, int]],
    ) -> None:
        self.environment = environment
        self.weight = weight
        self.seconds = seconds
        self.readers = readers
        self.on_end: list[Callable[[], None]] = []
        self.joined_s: dict[int, float] = {}
        self.start_s = 0.0
        self.end_s = 0.0
        self.missing = dict.fromkeys(readers, 1)
        for _, device, operation in readers.values():
            device.pending[operation] += 1

    @property
    def queues(self) -> list[DeviceQueue]:
        """Of the devices that hold a replica."""
        return [device for _, device, _ in self.readers.values()]

    def expect(self, stage: int) -> None:
        """A stage joins by one thing more."""
        self.missing[stage] += 1

    def join(self, stage: int) -> None:
        """A thing by which a stage joins: it has its part of the gradient."""
        self.missing[stage] -= 1
        if not self.missing[stage]:
            self.joined_s[stage] = self.environment.now
        if len(self.joined_s) == len(self.readers):
            self.start_s = self.environment.now
            Timeout(self.environment, self.seconds).callbacks.append(self._finish)

    def _finish(self, _: Event) -> None:
        self.end_s = self.environment.now
        for call in self.on_end:
            call()
        for _, device, operation in self.readers.values():
            device.arrived(operation)


def reduction_s(cluster: Cluster, weight: TiedWeight, ranks: Iterable[int]) -> float:
    """Time of the slowest transfer of a tied weight's gradient between two of its devices."""
    devices = sorted(set(ranks))
    return max(
        (cluster.transfer_s(a, b, weight.bytes) for a in devices for b in devices if a != b),
        default=0.0,
    )
