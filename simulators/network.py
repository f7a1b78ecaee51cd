"""The network: transfers between devices over links that they share.

A transfer *drains* through the links of its path, at its share of their bandwidth, and its bytes have arrived one
path latency later. Latency is a pure delay: it occupies nothing. ::

    issued and posted        drained            arrived
          │── bytes ÷ rate ────│── Σ latencies ────│
          links and queue taken

Between two devices and in one direction transfers drain one after another (the channel, an in-order queue). Transfers
that cross a link in one direction share its bandwidth max-min fairly, computed anew whenever one starts or has
drained. A transfer that meets nobody costs one SimPy event: its arrival.
"""

from collections.abc import Iterable, Sequence
from typing import cast

from simpy import Environment, Event
from simpy.events import Timeout

from ..core.cluster import Cluster
from ..core.messages import Message
from .device import DeviceQueue
from .sharing import fair_rates


class DirectedLink:
    """One direction of a link that several channels cross; ``transfers`` drain through it, or did when last seen."""

    __slots__ = ("bytes_per_s", "transfers")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.transfers: list[Transfer] = []

    def drop_drained(self, now: float) -> None:
        """Forget transfers that have drained: one that met nobody leaves no event behind that would do it."""
        self.transfers = [transfer for transfer in self.transfers if transfer.drained_s > now]


class Transfer:
    """One message under way."""

    __slots__ = (
        "arrived_s",
        "channel",
        "drained_s",
        "left",
        "message",
        "rate",
        "shared",
        "since_s",
        "start_s",
        "timer",
    )

    def __init__(self, message: Message, channel: "Channel") -> None:
        self.message = message
        self.channel = channel
        self.start_s = 0.0
        self.arrived_s = 0.0
        self.drained_s = 0.0
        self.left: float = message.bytes
        self.rate = 0.0
        self.since_s = 0.0
        self.shared = False  # an event of its own marks the moment when it has drained
        self.timer: Event | None = None  # the one event that counts; older ones are void


class Channel:
    """The in-order queue from one device to another."""

    __slots__ = (
        "bytes_per_s",
        "draining",
        "issued",
        "latency_s",
        "links",
        "network",
        "posted",
        "receiver",
        "started",
        "transfers",
    )

    def __init__(
        self,
        network: "Network",
        messages: Sequence[Message],
        receiver: DeviceQueue,
        bytes_per_s: float,
        latency_s: float,
    ) -> None:
        self.network = network
        self.receiver = receiver
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.links: tuple[DirectedLink, ...] = ()
        self.transfers = [Transfer(message, self) for message in messages]
        self.issued = 0
        self.posted = len(messages) if network.eager else 0
        self.started = 0
        self.draining: Transfer | None = None

    def issue(self) -> None:
        """The sender reached the next send."""
        self.issued += 1
        if self.started < self.posted:
            self.advance()

    def post(self) -> None:
        """The receiver reached the next receive."""
        self.posted += 1
        if self.started < self.issued:
            self.advance()

    def advance(self) -> None:
        """Start what may start."""
        now = self.network.environment.now
        while self.started < self.issued and self.started < self.posted:
            ahead = self.draining
            if ahead is not None and ahead.drained_s > now:
                self.network.mark_drained(ahead)
                return
            self._start(self.transfers[self.started], now)

    def _start(self, transfer: Transfer, now: float) -> None:
        self.started += 1
        self.draining = transfer
        transfer.start_s = transfer.since_s = now
        alone = True
        for link in self.links:
            if link.transfers:
                link.drop_drained(now)
                alone = alone and not link.transfers
            link.transfers.append(transfer)
        network = self.network
        if not alone:
            transfer.drained_s = float("inf")
            network.share([transfer])
            return
        seconds = transfer.left / self.bytes_per_s
        transfer.rate = self.bytes_per_s
        transfer.drained_s = now + seconds
        transfer.timer = timer = Timeout(network.environment, seconds + self.latency_s, transfer)
        timer.callbacks.append(network.on_arrival)


class Network:
    """All channels of one run.

    Args:
        environment: SimPy's.
        cluster: whose links they cross.
        queues: the messages of every ordered pair of devices, in order.
        devices: by number.
        eager: a send needs no posted receive.
    """

    def __init__(
        self,
        environment: Environment,
        cluster: Cluster,
        queues: dict[tuple[int, int], list[Message]],
        devices: Sequence[DeviceQueue],
        eager: bool,
    ) -> None:
        self.environment = environment
        self.eager = eager
        self.on_arrival = self._arrive
        self.channels: dict[tuple[int, int], Channel] = {}
        crossed: dict[tuple[str, str, bool], list[Channel]] = {}
        capacity: dict[tuple[str, str, bool], float] = {}
        for (src, dst), messages in queues.items():
            path = cluster.path(src, dst)
            rate = min(link.bytes_per_s for link, _ in path)
            latency_s = sum(link.latency_s for link, _ in path)
            channel = self.channels[src, dst] = Channel(self, messages, devices[dst], rate, latency_s)
            for link, from_a in path:
                crossed.setdefault((link.a, link.b, from_a), []).append(channel)
                capacity[link.a, link.b, from_a] = link.bytes_per_s
        for key, channels in crossed.items():
            # A link that one channel alone crosses is never shared, and one without a limit never matters.
            if len(channels) > 1 and capacity[key] != float("inf"):
                shared = DirectedLink(capacity[key])
                for channel in channels:
                    channel.links += (shared,)

    def times(self) -> dict[tuple[int, int], tuple[list[float], list[float]]]:
        """Per ordered pair of devices the starts and the arrivals of its messages, in seconds."""
        return {
            pair: ([t.start_s for t in channel.transfers], [t.arrived_s for t in channel.transfers])
            for pair, channel in self.channels.items()
        }

    def close(self) -> None:
        """Let go of everything, so that it is freed at once: collecting the cycles would cost as much as the run."""
        for channel in self.channels.values():
            channel.transfers.clear()
            channel.draining = None
            for link in channel.links:
                link.transfers.clear()
        self.channels.clear()
        del self.on_arrival

    def mark_drained(self, transfer: Transfer) -> None:
        """Have an event at the moment when a transfer has drained, because somebody waits for it."""
        if not transfer.shared:
            self._drain_in(transfer, transfer.drained_s - self.environment.now)

    def share(self, seeds: Iterable[Transfer]) -> None:
        """Compute the rates anew of all transfers that share links with these, directly or through others."""
        now = self.environment.now
        together = _connected(seeds, now)
        if not together:
            return
        routes = [transfer.channel.links for transfer in together]
        limits = [transfer.channel.bytes_per_s for transfer in together]
        rates = fair_rates(routes, limits, {link: link.bytes_per_s for route in routes for link in route})
        for transfer, rate in zip(together, rates, strict=True):
            transfer.left = max(0.0, transfer.left - transfer.rate * (now - transfer.since_s))
            transfer.since_s = now
            if rate != transfer.rate or not transfer.shared:
                transfer.rate = rate
                transfer.drained_s = now + transfer.left / rate
                self._drain_in(transfer, transfer.left / rate)

    def _drain_in(self, transfer: Transfer, seconds: float) -> None:
        transfer.shared = True
        transfer.timer = timer = Timeout(self.environment, max(0.0, seconds), transfer)
        timer.callbacks.append(self._drain)

    def _drain(self, event: Event) -> None:
        transfer = cast(Transfer, event.value)
        if transfer.timer is not event:
            return
        channel = transfer.channel
        if channel.draining is transfer:
            channel.draining = None
        transfer.drained_s = self.environment.now
        transfer.timer = timer = Timeout(self.environment, channel.latency_s, transfer)
        timer.callbacks.append(self.on_arrival)
        freed: dict[Transfer, None] = {}
        for link in channel.links:
            link.drop_drained(self.environment.now)
            freed.update(dict.fromkeys(link.transfers))
        channel.advance()
        if freed:
            self.share(freed)

    def _arrive(self, event: Event) -> None:
        transfer = cast(Transfer, event.value)
        if transfer.timer is event:
            transfer.timer = None
            transfer.arrived_s = self.environment.now
            transfer.channel.receiver.arrived(transfer.message.reader)


def _connected(seeds: Iterable[Transfer], now: float) -> list[Transfer]:
    """These transfers and all that share links with them, each in order of discovery."""
    found = {transfer: None for transfer in seeds if transfer.drained_s > now}
    frontier = list(found)
    while frontier:
        for link in frontier.pop().channel.links:
            link.drop_drained(now)
            for transfer in link.transfers:
                if transfer not in found:
                    found[transfer] = None
                    frontier.append(transfer)
    return list(found)
