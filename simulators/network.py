"""The network: flows over links that they share.

A *flow* drains through the links of its path, at its share of their bandwidth, and its bytes have arrived one path
latency later. Latency is a pure delay: it occupies nothing. ::

    issued and posted        drained            arrived
          │── bytes ÷ rate ────│── Σ latencies ────│
          links and queue taken

Messages and the phases of collectives are flows. What crosses a link in one direction shares its bandwidth max-min
fairly, computed again whenever a flow starts or has drained; all starts and drains at one time are computed together,
so that the order of simultaneous events has no effect. A flow without contention costs one SimPy event: its arrival. A
staged copy moves in pieces, so it drains through both parts of its route at once.

Rates are found by progressive filling: all rates grow equally until a link is full or a flow reaches its own limit. The
flows concerned keep their rate, and the others grow further. At the end no flow can gain without a loss of a flow that
has no more. (Bertsekas and Gallager, "Data Networks", section 6.5.2.)
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

from attrs import define, field
from simpy import Environment, Event
from simpy.events import Timeout

from ..core.cluster.routing import Link

INFINITE = float("inf")


Direction = tuple[str, str]
"""A link in one direction: names of the devices or hubs at its start and end."""


class Piece(NamedTuple):
    """A part of a flow's time in which its rate did not change.

    Args:
        start_s, end_s: when.
        rate: bytes/s over each path of the flow.
        held_by: the full link that limits its rate; None without contention.
    """

    start_s: float
    end_s: float
    rate: float
    held_by: Direction | None


class FlowTimes(NamedTuple):
    """Bytes that drained through links.

    Args:
        links: the links crossed; each is listed as often as it was crossed.
        bytes: over each path.
        bytes_per_s: rate without contention.
        start_s, drained_s: when the first and the last byte left.
        arrived_s: when the last byte had arrived.
        pieces: from start to end; None is one piece at ``bytes_per_s``.
    """

    links: tuple[Direction, ...]
    bytes: float
    bytes_per_s: float
    start_s: float
    drained_s: float
    arrived_s: float
    pieces: tuple[Piece, ...] | None = None

    @property
    def alone_s(self) -> float:
        """Time from start to end without contention."""
        return self.bytes / self.bytes_per_s

    @property
    def all_pieces(self) -> tuple[Piece, ...]:
        """Its rate from start to end."""
        if self.pieces is not None:
            return self.pieces
        return (Piece(self.start_s, self.drained_s, self.bytes_per_s, None),)


@define(eq=False)
class DirectedLink:
    """One direction of a link, or both together; ``flows`` drain through it, or have drained without an event.

    Args:
        direction: names of its start and end; of both together that from the link's a to its b.
    """

    direction: Direction
    bytes_per_s: float
    flows: "list[Flow]" = field(factory=list)

    def drop_drained(self, now: float) -> None:
        """Remove flows that have drained: a flow without contention has no event that would remove it."""
        self.flows = [flow for flow in self.flows if flow.drained_s > now]


@define(eq=False)
class Route:
    """The route of one or several flows.

    Args:
        directions: of the links that it crosses, each as often as it is crossed.
        links: the same links; and, for those whose directions share a rate, both directions together.
        latency_s: seconds from the last byte's leaving to its arrival.
        bytes_per_s: rate without contention.
        shared: the links that may slow it down because other routes cross them too; without those that can never be
            full, and those that are full only when another of them is.
        crossed: each of the shared ones once.
    """

    directions: tuple[Direction, ...]
    links: tuple[DirectedLink, ...]
    latency_s: float
    bytes_per_s: float
    shared: tuple[DirectedLink, ...] = ()
    crossed: tuple[DirectedLink, ...] = ()


@define(eq=False)
class Flow:
    """Bytes in flight.

    Args:
        size: bytes over each path of the route.
        on_arrival: called when its last byte has arrived.
        on_drained: called when its last byte has left, if that is an event; None for most flows.

    Attributes:
        left: bytes that have not left yet, at its last change of rate.
        awaited: whether it has an event for the time when it has drained.
        pieces: None is one, at the route's rate.
        timer: the valid arrival event; older ones are ignored.
    """

    route: Route
    size: float
    on_arrival: Callable[[], None]
    on_drained: Callable[[], None] | None = None
    left: float = 0.0
    rate: float = 0.0
    held_by: DirectedLink | None = None
    start_s: float = 0.0
    since_s: float = 0.0
    drained_s: float = INFINITE
    arrived_s: float = 0.0
    awaited: bool = False
    pieces: list[Piece] | None = None
    timer: Event | None = None

    def end_piece(self, now: float) -> None:
        """Its rate changes, or it has drained."""
        if now > self.since_s:
            held_by = None if self.held_by is None else self.held_by.direction
            self.pieces = self.pieces or []
            self.pieces.append(Piece(self.since_s, now, self.rate, held_by))
            self.since_s = now

    @property
    def times(self) -> FlowTimes:
        """Its times."""
        pieces, route = None if self.pieces is None else tuple(self.pieces), self.route
        times = self.start_s, self.drained_s, self.arrived_s
        return FlowTimes(route.directions, self.size, route.bytes_per_s, *times, pieces)


class Network:
    """All links of a run, and the flows on them."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.links: dict[Direction, DirectedLink] = {}
        self.duplex: dict[Direction, DirectedLink] = {}
        self.routes: list[Route] = []
        self._awaited: dict[Flow, None] = {}
        self._changed: dict[Flow, None] = {}
        self._wake: Event | None = None
        self._wake_s = INFINITE
        self._on_arrival = self._arrive
        self._on_wake = self._drain
        self._on_change = self._share

    def route(self, crossings: Iterable[tuple[Link, bool]], latency_s: float, bytes_per_s: float) -> Route:
        """A route over links, each with whether it is crossed from its a to its b."""
        links, duplex = [], []
        for link, from_a in crossings:
            direction = (link.a, link.b) if from_a else (link.b, link.a)
            links.append(self.links.setdefault(direction, DirectedLink(direction, link.rate(from_a))))
            if link.both_bytes_per_s is not None:
                both = DirectedLink((link.a, link.b), link.both_bytes_per_s)
                duplex.append(self.duplex.setdefault(both.direction, both))
        directions = tuple(link.direction for link in links)
        route = Route(directions, (*links, *duplex), latency_s, bytes_per_s)
        self.routes.append(route)
        return route

    def find_shared(self) -> None:
        """Set the shared links of all routes. Called once, after all routes are known."""
        crossed: dict[DirectedLink, Counter[Route]] = {}
        for route in self.routes:
            for link in route.links:
                crossed.setdefault(link, Counter())[route] += 1
        limiting = {link: routes for link, routes in crossed.items() if _may_be_full(link, routes)}
        kept: dict[DirectedLink, None] = {}
        for link, routes in limiting.items():
            others = [other for other in next(iter(routes)).links if other in limiting and other is not link]
            if not any(_covers(other, limiting[other], link, routes, other in kept) for other in others):
                kept[link] = None
        for route in self.routes:
            route.shared = tuple(link for link in route.links if link in kept)
            route.crossed = tuple(dict.fromkeys(route.shared))

    def close(self) -> None:
        """Drop all references."""
        for link in (*self.links.values(), *self.duplex.values()):
            link.flows.clear()
        del self._on_arrival, self._on_wake, self._on_change

    def start(self, flow: Flow) -> None:
        """Start a flow."""
        now = self.environment.now
        route = flow.route
        flow.start_s, flow.since_s, flow.left = now, now, flow.size
        if flow.left:
            alone = True
            for link in route.crossed:
                if link.flows:
                    link.drop_drained(now)
                    alone = alone and not link.flows
                link.flows.append(flow)
            if not alone:
                self._await(flow)
                self._change((flow,))
                return
        seconds = flow.left / route.bytes_per_s
        flow.rate = route.bytes_per_s
        flow.drained_s = now + seconds
        flow.timer = timer = Timeout(self.environment, seconds + route.latency_s, flow)
        timer.callbacks.append(self._on_arrival)

    def mark_drained(self, flow: Flow) -> None:
        """Create an event for the time when a flow has drained."""
        if not flow.awaited:
            self._await(flow)
            self._wake_up()

    def _await(self, flow: Flow) -> None:
        """From now on the end of draining is an event, and the arrival follows it."""
        flow.awaited = True
        flow.timer = None
        self._awaited[flow] = None

    def _wake_up(self) -> None:
        """Create an event for the time when the first of the awaited flows has drained."""
        first = min([flow.drained_s for flow in self._awaited], default=INFINITE)
        if first != INFINITE and (self._wake is None or first != self._wake_s):
            self._wake_s = first
            self._wake = Timeout(self.environment, max(0.0, first - self.environment.now))
            self._wake.callbacks.append(self._on_wake)

    def _drain(self, event: Event) -> None:
        if self._wake is not event:
            return
        self._wake = None
        now = self.environment.now
        done = [flow for flow in self._awaited if flow.drained_s <= self._wake_s]
        for flow in done:
            del self._awaited[flow]
            flow.end_piece(now)
            flow.left = 0.0
            flow.drained_s = now
            flow.timer = timer = Timeout(self.environment, flow.route.latency_s, flow)
            timer.callbacks.append(self._on_arrival)
        for flow in done:
            for link in flow.route.crossed:
                link.drop_drained(now)
                self._change(link.flows)
            if flow.on_drained is not None:
                flow.on_drained()
        if not self._changed:
            self._wake_up()

    def _arrive(self, event: Event) -> None:
        flow = cast(Flow, event.value)
        if flow.timer is event:
            flow.timer, flow.arrived_s = None, self.environment.now
            flow.on_arrival()

    def _change(self, flows: Sequence[Flow]) -> None:
        """Compute the rates of these flows, and of all that share links with them, after all events of the current
        time."""
        if flows and not self._changed:
            Timeout(self.environment, 0.0).callbacks.append(self._on_change)
        for flow in flows:
            self._changed[flow] = None

    def _share(self, _: Event) -> None:
        now = self.environment.now
        together = _connected(self._changed, now)
        self._changed = {}
        if len(together) == 1:
            self._set_rate(together[0], together[0].route.bytes_per_s, None, now)
            self._wake_up()
            return
        shared = [flow.route.shared for flow in together]
        rates, held_by = fair_rates(
            shared,
            [flow.route.bytes_per_s for flow in together],
            {link: link.bytes_per_s for links in shared for link in links},
        )
        for flow, rate, held in zip(together, rates, held_by, strict=True):
            self._set_rate(flow, rate, held, now)
            if not flow.awaited:  # at an unchanged rate, too: its end may give the others more
                self._await(flow)
        self._wake_up()

    def _set_rate(self, flow: Flow, rate: float, held_by: DirectedLink | None, now: float) -> None:
        if rate == flow.rate and held_by is flow.held_by:
            return
        if now > flow.since_s:
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since_s))
            flow.end_piece(now)
        flow.rate = rate
        flow.held_by = held_by
        flow.drained_s = now + flow.left / rate


def _may_be_full(link: DirectedLink, routes: Counter[Route]) -> bool:
    """Whether several routes together may exceed a link's bandwidth."""
    asked = sum(route.bytes_per_s * count for route, count in routes.items())
    return len(routes) > 1 and asked > link.bytes_per_s


def _covers(
    other: DirectedLink, of_other: Counter[Route], link: DirectedLink, of_link: Counter[Route], first: bool
) -> bool:
    """Whether ``other`` is always full before ``link``, because all routes of ``link`` cross it as often; of two that
    cover each other, the one kept first does."""
    if other.bytes_per_s > link.bytes_per_s or not of_link <= of_other:
        return False
    return first or other.bytes_per_s < link.bytes_per_s or of_link != of_other


def _connected(seeds: Iterable[Flow], now: float) -> list[Flow]:
    """These flows and all that share links with them, each in order of discovery."""
    found = {flow: None for flow in seeds if flow.drained_s > now}
    frontier = list(found)
    while frontier:
        for link in frontier.pop().route.crossed:
            for flow in link.flows:
                if flow not in found and flow.drained_s > now:
                    found[flow] = None
                    frontier.append(flow)
    return list(found)


Shared = TypeVar("Shared", bound=Hashable)


def fair_rates(
    routes: Sequence[Sequence[Shared]], limits: Sequence[float], capacity: Mapping[Shared, float]
) -> tuple[list[float], list[Shared | None]]:
    """Rate of every flow, in bytes/s, and the full link that holds it there; None where its own limit does.

    Args:
        routes: per flow the links that it crosses, each in one direction; a link is listed as often as it is crossed.
        limits: per flow its highest rate without contention.
        capacity: per link its bandwidth, in bytes/s.
    """
    rates = [0.0] * len(routes)
    held_by: list[Shared | None] = [None] * len(routes)
    growing = list(range(len(routes)))
    left = {link: capacity[link] for route in routes for link in route}
    while growing:
        crossing: dict[Shared, int] = {}
        for flow in growing:
            for link in routes[flow]:
                crossing[link] = crossing.get(link, 0) + 1
        shares = {link: left[link] / count for link, count in crossing.items()}
        level = min([*shares.values(), *(limits[flow] for flow in growing)])
        grow_on = []
        for flow in growing:
            if limits[flow] > level:
                for link in routes[flow]:
                    if shares[link] <= level:
                        held_by[flow] = link
                        break
                else:
                    grow_on.append(flow)
                    continue
            rates[flow] = level
            for link in routes[flow]:
                left[link] -= level
        growing = grow_on
    return rates, held_by
