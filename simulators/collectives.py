"""Collectives: steps of flows over the links between their members, one step after another."""

from collections.abc import Callable, Sequence

from simpy.events import Timeout

from ..core.cluster.collectives import Phase
from ..core.cluster.routing import Hop
from .network.flow_times import FlowTimes
from .network.flows import Route, Shipment
from .network.network import Network


class Collective:
    """One collective.

    Args:
        network: the network whose links it crosses.
        steps: in order; the flows of a step run at the same time.
        delay_s: its duration if it has no steps.
        routes: the routes of collectives that never run at the same time as this one, by what they cross; new ones are
            added.

    Attributes:
        steps: the flows of each step.
        alone_s: its duration in seconds without contention.
        on_end: called when all flows of the last step have arrived.
        start_s, end_s: its times.
    """

    def __init__(
        self,
        network: Network,
        steps: Sequence[Sequence[Phase]],
        delay_s: float = 0.0,
        routes: dict[tuple[Hop, ...], Route] | None = None,
    ) -> None:
        self.network = network
        self._routes = routes
        self.delay_s = delay_s
        self.alone_s = sum((max(phase.seconds for phase in step) for step in steps), delay_s if not steps else 0.0)
        self.steps = [[Shipment(self._route(phase), phase.bytes, self._arrived) for phase in step] for step in steps]
        self.on_end: list[Callable[[], None]] = []
        self.begun = 0
        self.under_way = 0
        self.start_s = 0.0
        self.end_s = 0.0

    def _route(self, phase: Phase) -> Route:
        known = None if self._routes is None else self._routes.get(phase.crossings)
        if known is not None:
            return known
        route = self.network.route(phase.crossings, phase.latency_s, phase.bytes_per_s)
        if self._routes is not None:
            self._routes[phase.crossings] = route
        return route

    @property
    def slowest(self) -> list[FlowTimes]:
        """The last flow to arrive in each step."""
        return [max(step, key=_arrival_s).times for step in self.steps]

    def start(self) -> None:
        """Start; all members have joined."""
        self.start_s = self.network.environment.now
        if self.steps:
            self._advance()
        else:  # the end is an event, as every arrival is, even where nothing moves
            Timeout(self.network.environment, self.delay_s).callbacks.append(lambda _: self._advance())

    def _arrived(self) -> None:
        self.under_way -= 1
        if not self.under_way:
            self._advance()

    def _advance(self) -> None:
        """Start the next step, or end."""
        if self.begun < len(self.steps):
            self.begun += 1
            step = self.steps[self.begun - 1]
            self.under_way = len(step)
            for flow in step:
                self.network.start(flow)
            return
        self.end_s = self.network.environment.now
        for call in self.on_end:
            call()

    def close(self) -> None:
        """Release references, so that everything is freed at once."""
        self.on_end.clear()
        self.steps.clear()


def _arrival_s(flow: Shipment) -> float:
    return flow.drained_s + flow.route.latency_s
