"""Collectives: phases of flows over the links between their members, one after another."""

from collections.abc import Callable, Sequence

from simpy.events import Timeout

from ..core.cluster.collectives import Phase
from .network import Network, Shipment


class Collective:
    """One collective: its phases, one after another.

    Args:
        network: whose links it crosses.
        phases: in order; none take no time.

    Attributes:
        flows: one for each phase.
        alone_s: seconds that it takes while nothing else is on its links.
        on_end: called when the last phase has arrived.
        start_s, end_s: when.
    """

    def __init__(self, network: Network, phases: Sequence[Phase]) -> None:
        self.network = network
        self.alone_s = sum(phase.seconds for phase in phases)
        self.flows = [
            Shipment(network.route(phase.crossings, phase.latency_s, phase.bytes_per_s), phase.bytes, self.advance)
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

    def close(self) -> None:
        """Let go of everything, so that it is freed at once."""
        self.on_end.clear()
        self.flows.clear()
