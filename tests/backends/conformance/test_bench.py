"""The bench of a rule: messages between threads, received into buffers of other values."""

from concurrent.futures import ThreadPoolExecutor

import torch
from panpipe.backends.conformance.bench import Bench
from panpipe.backends.conformance.payload import BrokenRuleError
from panpipe.backends.memcpy import connect

CPU = torch.device("cpu")


def benches(count=2):
    return [Bench(end, dtypes=[torch.float32], where=CPU, alone=False) for end in connect(count)]


def together(count, work):
    """The results of work on each bench, on a thread of its own."""
    own = benches(count)
    with ThreadPoolExecutor(count) as threads:
        running = [threads.submit(work, bench) for bench in own]
        return [each.result(30) for each in running]


def test_others_are_all_devices_but_this_one():
    assert [bench.others for bench in benches(3)] == [[1, 2], [0, 2], [0, 1]]


def test_buffers_have_ones_until_the_message_arrives():
    first, second = benches()
    handle, (buffer,) = second.receive([torch.zeros(3)], 0)
    assert buffer.tolist() == [1.0] * 3
    sending, (sent,) = first.send([torch.full((3,), 2.0)], 1)
    handle.wait()
    sending.wait()
    assert buffer.tolist() == sent.tolist() == [2.0] * 3


def test_messages_of_every_pair_are_exchanged():
    received = []

    def work(bench):
        def messages(sender, receiver):
            received.append((sender, receiver))
            return [[torch.full((2,), float(10 * sender + receiver))], [torch.full((1,), float(sender))]]

        bench.exchange(messages, lambda sender, number: f"message {number} of {sender}")

    together(3, work)
    assert {(a, b) for a in range(3) for b in range(3) if a != b} == set(received)


def test_message_that_is_not_the_expected_one_is_a_broken_rule():
    def work(bench):
        def messages(sender, receiver):
            seen_by = bench.end.device
            return [[torch.full((2,), float(seen_by if sender == 1 else 5))]]

        try:
            bench.exchange(messages, lambda sender, number: f"message {number} of {sender}")
        except BrokenRuleError as error:
            return str(error)
        return None

    first, second = together(2, work)
    assert second is None
    assert first is not None
    assert first.startswith("message 0 of 1, a tensor [2] of float32, arrived with")
