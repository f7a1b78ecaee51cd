"""What the network moves: flows, their routes, and the directions of links that they drain through."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from simpy import Event

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
        pieces: from start to end; None is one piece at ``bytes_per_s``.
    """

    links: tuple[Direction, ...]
    bytes: float
    bytes_per_s: float
    start_s: float
    drained_s: float
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


class DirectedLink:
    """One direction of a link, or both together; ``flows`` drain through it, or have drained without an event.

    Args:
        direction: names of its start and end; of both together that from the link's a to its b.
    """

    __slots__ = ("bytes_per_s", "direction", "flows")

    def __init__(self, direction: Direction, bytes_per_s: float) -> None:
        self.direction = direction
        self.bytes_per_s = bytes_per_s
        self.flows: list[Flow] = []

    def drop_drained(self, now: float) -> None:
        """Remove flows that have drained: a flow without contention has no event that would remove it."""
        self.flows = [flow for flow in self.flows if flow.drained_s > now]


class Route:
    """The route of one or several flows.

    Args:
        links: a link is listed as often as it is crossed.
        latency_s: seconds from the last byte's leaving to its arrival.
        bytes_per_s: rate without contention.
        duplex: for crossed links whose directions share a rate, both directions together.

    Attributes:
        directions: those of ``links``.
        shared: the links that may slow it down because other routes cross them too; without those that can never be
            full, and those that are full only when another of them is.
    """

    __slots__ = ("bytes_per_s", "crossed", "directions", "latency_s", "links", "shared")

    def __init__(
        self,
        links: Sequence[DirectedLink],
        latency_s: float,
        bytes_per_s: float,
        duplex: Sequence[DirectedLink] = (),
    ) -> None:
        self.links = (*links, *duplex)
        self.directions = tuple(link.direction for link in links)
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.shared: tuple[DirectedLink, ...] = ()
        self.crossed: tuple[DirectedLink, ...] = ()  # each of the shared ones once


class Flow(ABC):
    """Bytes in flight.

    Args:
        size: bytes over each path of the route.
    """

    __slots__ = (
        "awaited",
        "drained_s",
        "held_by",
        "left",
        "pieces",
        "rate",
        "route",
        "since_s",
        "size",
        "start_s",
        "timer",
    )

    def __init__(self, route: Route, size: float) -> None:
        self.route = route
        self.size = size
        self.left = size
        self.rate = 0.0
        self.held_by: DirectedLink | None = None
        self.start_s = 0.0
        self.since_s = 0.0
        self.drained_s = INFINITE
        self.awaited = False  # whether it has an event for the time when it has drained
        self.pieces: list[Piece] | None = None  # None: one, at the route's rate
        self.timer: Event | None = None  # the valid arrival event; older ones are ignored

    def drained(self) -> None:  # noqa: B027 - most flows do nothing then
        """Its last byte has left; called if that is an event."""

    @abstractmethod
    def arrived(self) -> None:
        """Its last byte has arrived."""

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
        pieces = None if self.pieces is None else tuple(self.pieces)
        route = self.route
        return FlowTimes(route.directions, self.size, route.bytes_per_s, self.start_s, self.drained_s, pieces)


class Shipment(Flow):
    """A flow that calls back when it has arrived."""

    __slots__ = ("on_arrival",)

    def __init__(self, route: Route, size: float, on_arrival: Callable[[], None]) -> None:
        super().__init__(route, size)
        self.on_arrival = on_arrival

    def arrived(self) -> None:
        """Call back."""
        self.on_arrival()
