"""Messages between virtual devices: a clock delivers them in order, and a wait before that is an error."""

import pytest
import torch
from panpipe.backends.clocked import ClockedExchange


def test_message_arrives_when_the_clock_delivers_it():
    exchange = ClockedExchange()
    first, second = exchange.transport(0), exchange.transport(1)
    sent, buffer = torch.ones(2), torch.zeros(2)
    here, there = first.send([sent], 1), second.receive([buffer], 0)
    for handle in (here, there):
        with pytest.raises(RuntimeError, match="a message from device 0 to device 1 was waited for before the clock"):
            handle.wait()
    assert buffer.tolist() == [0, 0]
    exchange.deliver(0, 1)
    here.wait()
    there.wait()
    assert buffer.tolist() == [1, 1]


def test_messages_of_a_pair_keep_their_order_and_pairs_are_apart():
    exchange = ClockedExchange()
    ends = [exchange.transport(device) for device in range(3)]
    for number in (1.0, 2.0):
        ends[0].send([torch.tensor([number])], 1)
    ends[2].send([torch.tensor([3.0])], 1)
    buffers = [torch.zeros(1) for _ in range(3)]
    for buffer, source in zip(buffers, (0, 0, 2), strict=True):
        ends[1].receive([buffer], source)
    exchange.deliver(2, 1)
    assert [buffer.item() for buffer in buffers] == [0, 0, 3]
    exchange.deliver(0, 1)
    assert [buffer.item() for buffer in buffers] == [1, 0, 3]
    exchange.deliver(0, 1)
    assert [buffer.item() for buffer in buffers] == [1, 2, 3]


def test_sent_tensors_are_freed_at_the_delivery():
    exchange = ClockedExchange()
    sent, buffer = torch.ones(1), torch.zeros(1)
    handle = exchange.transport(0).send([sent], 1)
    exchange.transport(1).receive([buffer], 0)
    assert handle.tensors is not None
    exchange.deliver(0, 1)
    assert handle.tensors is None


def test_ends_of_different_lengths_are_refused():
    exchange = ClockedExchange()
    exchange.transport(0).send([torch.ones(1), torch.ones(1)], 1)
    exchange.transport(1).receive([torch.ones(1)], 0)
    with pytest.raises(ValueError, match="shorter"):
        exchange.deliver(0, 1)
