"""Channels: the in-order queue of messages from one device to another.

A message starts when it is sent, its receive is posted and the previous message has drained; latencies overlap.
"""

from collections.abc import Sequence
from functools import partial

from attrs import define, field

from ..core.cluster.cluster import Cluster
from ..core.cluster.routing import path_latency_s, path_rate
from ..core.plan.items import Message
from .device import DeviceQueue
from .network import Flow, Network, Route


@define(eq=False)
class Channel:
    """The messages from one device to another.

    Args:
        posted: number of posted receives; all from the start if a send needs none.

    Attributes:
        flows: the messages, in order.
    """

    _network: Network
    _route: Route
    _posted: int
    flows: list[Flow] = field(factory=list, init=False)
    _issued: int = field(default=0, init=False)
    _started: int = field(default=0, init=False)

    def add(self, message: Message, receiver: DeviceQueue) -> None:
        """Add the next message, which an operation of the receiver awaits."""
        receiver.pending[message.reader] += 1
        arrived = partial(receiver.arrived, message.reader)
        self.flows.append(Flow(self._route, message.bytes, arrived, self._advance))

    def issue(self) -> None:
        """The sender reached the next send."""
        self._issued += 1
        if self._issued <= self._posted:
            self._advance()

    def post(self) -> None:
        """The receiver reached the next receive."""
        self._posted += 1
        if self._posted <= self._issued:
            self._advance()

    def _advance(self) -> None:
        """Start the messages that are ready; also called when one has drained and the next one waits for that."""
        network, flows = self._network, self.flows
        now = network.environment.now
        ready = min(self._issued, self._posted)
        while self._started < ready:
            if self._started:
                ahead = flows[self._started - 1]
                if ahead.drained_s > now:
                    network.mark_drained(ahead)
                    return
            self._started += 1
            network.start(flows[self._started - 1])


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
        eager: a send needs no posted receive.
    """
    channels = {}
    for (src, dst), messages in queues.items():
        path = cluster.path(src, dst)
        route = network.route(path, path_latency_s(path), path_rate(path))
        channel = channels[src, dst] = Channel(network, route, len(messages) if eager else 0)
        issue, sender = channel.issue, devices[src].between
        for message in messages:
            channel.add(message, devices[dst])
            sender[message.issued + 1].append(issue)
    # At one position a device issues its sends before it posts its receives.
    for (src, dst), messages in queues.items():
        post, receiver = channels[src, dst].post, devices[dst].between
        for message in messages:
            receiver[message.posted].append(post)
    return channels
