"""Channels: the in-order queue of messages from one device to another.

A message starts when it is sent, its receive is posted and the previous message has drained; latencies overlap.
"""

from collections.abc import Sequence

from attrs import frozen

from ..core.cluster.cluster import Cluster
from ..core.cluster.routing import path_latency_s, path_rate
from ..core.plan.items import Message
from .device import DeviceQueue
from .network.flows import Flow, FlowTimes, Route
from .network.network import Network


@frozen
class QueueTimes:
    """The messages from one device to another.

    Args:
        flows: in order.
        starts, arrivals: when each started, and when it had arrived.
    """

    flows: list[FlowTimes]
    starts: list[float]
    arrivals: list[float]


class Transfer(Flow):
    """One message in flight."""

    __slots__ = ("arrived_s", "channel", "message")

    def __init__(self, message: Message, channel: "Channel") -> None:
        super().__init__(channel.route, message.bytes)
        self.message = message
        self.channel = channel
        self.arrived_s = 0.0

    def drained(self) -> None:
        """The next message of the channel may start."""
        self.channel.advance()

    def arrived(self) -> None:
        """The receiver has it."""
        self.arrived_s = self.channel.network.environment.now
        self.channel.receiver.arrived(self.message.reader)


class Channel:
    """The messages from one device to another.

    Args:
        receiver: compute queue of the receiving device.
        eager: a send needs no posted receive.
    """

    __slots__ = ("issued", "network", "posted", "receiver", "route", "started", "transfers")

    def __init__(
        self, network: Network, route: Route, messages: Sequence[Message], receiver: DeviceQueue, eager: bool
    ) -> None:
        self.network = network
        self.route = route
        self.receiver = receiver
        self.transfers = [Transfer(message, self) for message in messages]
        self.issued = 0
        self.posted = len(messages) if eager else 0
        self.started = 0

    def close(self) -> None:
        """Drop all references, so that everything is freed at once."""
        self.transfers.clear()

    def issue(self) -> None:
        """The sender reached the next send."""
        self.issued += 1
        if self.issued <= self.posted:
            self.advance()

    def post(self) -> None:
        """The receiver reached the next receive."""
        self.posted += 1
        if self.posted <= self.issued:
            self.advance()

    def advance(self) -> None:
        """Start the messages that are ready."""
        network, transfers = self.network, self.transfers
        now = network.environment.now
        ready = min(self.issued, self.posted)
        while self.started < ready:
            if self.started:
                ahead = transfers[self.started - 1]
                if ahead.drained_s > now:
                    network.mark_drained(ahead)
                    return
            self.started += 1
            network.start(transfers[self.started - 1])


def queue_times(channel: Channel) -> QueueTimes:
    """The times of a channel's messages."""
    transfers = channel.transfers
    return QueueTimes(
        [transfer.times for transfer in transfers],
        [transfer.start_s for transfer in transfers],
        [transfer.arrived_s for transfer in transfers],
    )


def connect(
    network: Network,
    cluster: Cluster,
    queues: dict[tuple[int, int], list[Message]],
    devices: Sequence[DeviceQueue],
    eager: bool,
) -> dict[tuple[int, int], Channel]:
    """A channel for every ordered pair of devices that has messages: its sender issues them, its receiver posts and
    awaits them.

    Args:
        devices: by rank, not yet started.
    """
    channels = {}
    for (src, dst), messages in queues.items():
        path = cluster.path(src, dst)
        route = network.route(path, path_latency_s(path), path_rate(path))
        channel = channels[src, dst] = Channel(network, route, messages, devices[dst], eager)
        issue, sender, awaited = channel.issue, devices[src].between, devices[dst].pending
        for message in messages:
            sender[message.issued + 1].append(issue)
            awaited[message.reader] += 1
    # At one position a device issues its sends before it posts its receives.
    for (src, dst), messages in queues.items():
        post, receiver = channels[src, dst].post, devices[dst].between
        for message in messages:
            receiver[message.posted].append(post)
    return channels
