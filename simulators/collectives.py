"""Collectives: phases of flows over the links between their members, and the reduction of gradients over replicas.

Whose ``REDUCE_GRAD`` it is, computes on meanwhile; the reduction occupies links alone::

    replica 0, compute   ... 1B7 │ 0B6 │ 0B7 │ ......... 1STEP
                                 ▼ joins                 ▲
    devices of 1               [ reduction of stage 1 ]──┤      starts with the last replica, contends with messages
                                   ▲ joins               ▼
    replica 1, compute      ... 1B7 │ 0B6 │ 0B7 │ ...... 1STEP

Over the same devices one reduction runs at a time, in the order issued, as on a communicator's stream.
"""

from collections.abc import Callable, Sequence

from simpy.events import Timeout

from ..core.cluster import Cluster
from ..core.collectives import Phase, collective_phases
from .device import DeviceQueue
from .network import Flow, Network, Route


class PhaseFlow(Flow):
    """What all members of a collective send in one phase."""

    __slots__ = ("collective",)

    def __init__(self, route: Route, size: float, collective: "Collective") -> None:
        super().__init__(route, size)
        self.collective = collective

    def arrived(self) -> None:
        """The next phase begins."""
        self.collective.advance()


class Collective:
    """One collective: its phases, one after another.

    Args:
        network: whose links it crosses.
        phases: in order; none take no time.

    Attributes:
        flows: one for each phase.
        on_end: called when the last phase has arrived.
        start_s, end_s: when.
    """

    def __init__(self, network: Network, phases: Sequence[Phase]) -> None:
        self.network = network
        self.flows = [
            PhaseFlow(network.route(phase.crossings, phase.latency_s, phase.bytes_per_s), phase.bytes, self)
            for phase in phases
        ]
        self.on_end: list[Callable[[], None]] = []
        self.begun = 0
        self.start_s = 0.0
        self.end_s = 0.0

    def start(self) -> None:
        """All members are there."""
        self.start_s = self.network.environment.now
        if self.flows:
            self.advance()
        else:  # the end is an event, as every arrival is, even where nothing moves
            Timeout(self.network.environment, 0.0).callbacks.append(lambda _: self.advance())

    def advance(self) -> None:
        """Start the next phase, or end."""
        if self.begun < len(self.flows):
            self.begun += 1
            self.network.start(self.flows[self.begun - 1])
            return
        self.end_s = self.network.environment.now
        for call in self.on_end:
            call()


class GradientReduction:
    """The gradients of one stage, summed over its replicas by an all-reduce: one bucket.

    Args:
        collective: what moves them.
        stage: whose.
        bytes: of one replica's gradients.
        members: per replica the rank of its device, the queue of that, and the operation that waits: the stage's STEP.

    Attributes:
        joined_s: when each rank issued it.
    """

    def __init__(
        self, collective: Collective, stage: int, size: float, members: Sequence[tuple[int, DeviceQueue, int]]
    ) -> None:
        self.collective = collective
        self.stage = stage
        self.bytes = size
        self.members = members
        self.joined_s: dict[int, float] = {}
        for _, device, operation in members:
            device.pending[operation] += 1
        collective.on_end.append(self._release)

    @property
    def queues(self) -> list[DeviceQueue]:
        """Of the devices that hold a replica of the stage."""
        return [device for _, device, _ in self.members]

    @property
    def on_end(self) -> list[Callable[[], None]]:
        """Called when the sums are there."""
        return self.collective.on_end

    @property
    def complete(self) -> bool:
        """Whether every replica has issued it."""
        return len(self.joined_s) == len(self.members)

    def _release(self) -> None:
        for _, device, operation in self.members:
            device.arrived(operation)


class Communicator:
    """The reductions over the same devices, one after another.

    Args:
        reductions: in the order in which every member issues them.
    """

    def __init__(self, reductions: Sequence[GradientReduction]) -> None:
        self.reductions = reductions
        self.begun = 0
        for reduction in reductions:
            reduction.on_end.append(self._advance)

    def join(self, reduction: GradientReduction, rank: int) -> None:
        """A replica has its part of the gradients."""
        reduction.joined_s[rank] = reduction.collective.network.environment.now
        if reduction is self.reductions[self.begun] and reduction.complete:
            reduction.collective.start()

    def _advance(self) -> None:
        self.begun += 1
        if self.begun < len(self.reductions) and self.reductions[self.begun].complete:
            self.reductions[self.begun].collective.start()


def reduce_over(
    network: Network, cluster: Cluster, size: float, stage: int, members: Sequence[tuple[int, DeviceQueue, int]]
) -> GradientReduction:
    """The reduction of a stage's gradients over its replicas, by the algorithm that is fastest alone."""
    phases = collective_phases(cluster, [rank for rank, _, _ in members], size)
    return GradientReduction(Collective(network, phases), stage, size, members)
