"""Channels by hand: when a message starts, drains and arrives, and which callbacks run."""

import pytest
from panpipe.core.actions import parse_action
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.plan.items import Message
from panpipe.simulators.channels import Channel, connect, queue_times
from panpipe.simulators.device import DeviceQueue
from panpipe.simulators.network.network import Network
from simpy import Environment
from simpy.events import Timeout

RATE, LATENCY = 10.0, 3.0
CLUSTER = fully_connected(2, 10**6, RATE, LATENCY)


def message(number: int, size: float, *, issued: int = 0, posted: int = 0, reader: int = 0) -> Message:
    send, receive = parse_action(f"0SEND_F{number}>1"), parse_action(f"1RECV_F{number}<0")
    return Message(send, receive, 0, 1, size, issued, posted, reader)


class Hand:
    """A channel of 10 B/s with a latency of 3 s, whose sends and receives are issued by hand."""

    def __init__(self, *sizes: float, eager: bool = False) -> None:
        self.environment = Environment()
        network = Network(self.environment)
        self.receiver = DeviceQueue(self.environment, [1.0] * len(sizes))
        self.receiver.pending = [1] * len(sizes)
        route = network.route(CLUSTER.path(0, 1), LATENCY, RATE)
        messages = [message(m, size, reader=m) for m, size in enumerate(sizes)]
        self.channel = Channel(network, route, messages, self.receiver, eager)
        network.find_shared()
        self.receiver.begin()

    def at(self, second: float, call) -> None:
        Timeout(self.environment, second).callbacks.append(lambda _: call())

    def run(self):
        self.environment.run()
        return queue_times(self.channel)


@pytest.mark.parametrize(("eager", "ready"), [(False, 4.0), (True, 1.0)])
def test_message_starts_when_sent_and_posted_or_when_sent_alone_if_eager(eager, ready):
    hand = Hand(20, eager=eager)
    hand.at(1.0, hand.channel.issue)
    if not eager:
        hand.at(4.0, hand.channel.post)
    times = hand.run()
    assert (times.ready_s, times.starts, times.arrivals) == ([ready], [ready], [ready + 2.0 + LATENCY])
    assert hand.receiver.starts == times.arrivals


def test_message_posted_early_starts_when_it_is_sent():
    hand = Hand(20)
    hand.at(1.0, hand.channel.post)
    hand.at(4.0, hand.channel.issue)
    assert hand.run().starts == [4.0]


def test_messages_of_a_channel_start_when_the_one_before_has_drained_and_their_latencies_overlap():
    hand = Hand(20, 10)
    for call in (hand.channel.issue, hand.channel.issue, hand.channel.post, hand.channel.post):
        hand.at(1.0, call)
    times = hand.run()
    # The first drains from 1 to 3 and arrives at 6; the second drains from 3 to 4 and arrives at 7.
    assert (times.ready_s, times.starts, times.arrivals) == ([1.0, 1.0], [1.0, 3.0], [6.0, 7.0])


def test_message_that_is_not_posted_holds_up_those_after_it():
    hand = Hand(20, 10)
    for second, call in ((0.0, hand.channel.issue), (0.0, hand.channel.issue), (5.0, hand.channel.post)):
        hand.at(second, call)
    times = hand.run()
    assert times.arrivals == [10.0, 0.0]  # the second is not posted, and never starts
    assert hand.channel.started == 1


def test_channel_reports_an_arrival_before_its_reader_starts():
    hand, seen = Hand(20, eager=True), []
    hand.channel.on_arrival = lambda sent: seen.append((sent.reader, hand.environment.now, list(hand.receiver.starts)))
    hand.at(0.0, hand.channel.issue)
    hand.run()
    assert seen == [(0, 5.0, [])]
    assert hand.receiver.starts == [5.0]


def test_connect_issues_after_the_senders_item_and_posts_before_the_receivers():
    environment = Environment()
    network = Network(environment)
    sender, receiver = DeviceQueue(environment, [2.0]), DeviceQueue(environment, [1.0, 1.0])
    queues = {(0, 1): [message(0, 20, issued=0, posted=1, reader=1)]}
    channels = connect(network, CLUSTER, queues, [sender, receiver], eager=False)
    network.find_shared()
    sender.begin()
    receiver.begin()
    environment.run()
    # Sent at 2, after the sender's only item; posted at 1, between the receiver's items; 2 s to drain, 3 s of latency.
    assert list(channels) == [(0, 1)]
    assert queue_times(channels[0, 1]).arrivals == [7.0]
    assert (receiver.starts, receiver.ends) == ([0.0, 7.0], [1.0, 8.0])
