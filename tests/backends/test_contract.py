"""The collective operations that a backend has without overriding them, over messages in one thread."""

from collections import defaultdict, deque

import pytest
import torch
from panpipe.backends.contract import Backend

Mail = defaultdict[tuple[int, int], deque]


class Received:
    def __init__(self, letters, buffers):
        self.letters, self.buffers = letters, buffers

    def wait(self):
        for buffer, tensor in zip(self.buffers, self.letters.popleft(), strict=True):
            buffer.copy_(tensor)


class Sent:
    def wait(self):
        pass


class End(Backend):
    """Sends at once into the letters that the peer receives when it waits."""

    name = "letters"

    def __init__(self, device: int, devices: int, mail: Mail) -> None:
        self.device, self.devices, self.mail = device, devices, mail

    def send(self, tensors, peer):
        self.mail[self.device, peer].append([tensor.clone() for tensor in tensors])
        return Sent()

    def receive(self, buffers, peer):
        return Received(self.mail[peer, self.device], buffers)

    def close(self, failure=None):
        pass


def ends(devices: int) -> list[End]:
    mail: Mail = defaultdict(deque)
    return [End(device, devices, mail) for device in range(devices)]


def addends(devices: int, rows: int) -> list[torch.Tensor]:
    """Float16, so that the order of a sum changes its bits."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 16, generator=generator).half() for _ in range(devices)]


def in_order(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_sums_add_in_the_order_of_the_devices_on_each_of_them(devices):
    given = addends(devices, devices * 2)
    totals = [tensor.clone() for tensor in given]
    for handle in [end.all_reduce(total) for end, total in zip(ends(devices), totals, strict=True)]:
        handle.wait()
        handle.wait()  # does not add again
    assert all(torch.equal(total, in_order(given)) for total in totals)
    if devices > 2:
        assert not torch.equal(in_order(given), in_order(given[::-1]))


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_reduce_scatter_leaves_each_device_the_sum_of_its_part(devices):
    given = addends(devices, devices * 2)
    totals = [tensor.clone() for tensor in given]
    for handle in [end.reduce_scatter(total) for end, total in zip(ends(devices), totals, strict=True)]:
        handle.wait()
    for device, total in enumerate(totals):
        assert torch.equal(total.chunk(devices)[device], in_order(given).chunk(devices)[device])


def test_all_gather_gives_all_parts_to_all():
    given = addends(3, 6)
    gathered = [tensor.clone() for tensor in given]
    for handle in [end.all_gather(tensor) for end, tensor in zip(ends(3), gathered, strict=True)]:
        handle.wait()
    expected = torch.cat([tensor.chunk(3)[device] for device, tensor in enumerate(given)])
    assert all(torch.equal(tensor, expected) for tensor in gathered)


def test_broadcast_sends_the_source_to_all_others():
    tensors = [torch.full((2,), float(device)) for device in range(3)]
    for handle in [end.broadcast([tensor], 1) for end, tensor in zip(ends(3), tensors, strict=True)]:
        handle.wait()
    assert all(torch.equal(tensor, torch.ones(2)) for tensor in tensors)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_empty_tensors_move_and_change_nothing(operation):
    for handle in [getattr(end, operation)(torch.empty(0, 3)) for end in ends(2)]:
        handle.wait()


def test_reduce_scatters_receive_into_the_same_memory_until_it_is_freed():
    received: list[int] = []

    class Noting(End):
        def receive(self, buffers, peer):
            received.extend(buffer.data_ptr() for buffer in buffers)
            return super().receive(buffers, peer)

    mail: Mail = defaultdict(deque)
    both = [Noting(device, 2, mail) for device in range(2)]
    for tensors in (addends(2, 4), addends(2, 2)):  # a smaller sum uses the same memory
        totals = [tensor.clone() for tensor in tensors]
        for handle in [end.reduce_scatter(total) for end, total in zip(both, totals, strict=True)]:
            handle.wait()
        assert torch.equal(totals[1].chunk(2)[1], in_order(tensors).chunk(2)[1])
    assert received[:2] == received[2:]
    assert len(set(received)) == 2
    for end in both:
        end.free_addends()
        assert end._addends._free == []
