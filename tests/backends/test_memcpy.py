"""Messages between the threads of one process, here called by one thread in turns."""

import pytest
import torch
from panpipe.backends.memcpy import connect
from panpipe.core.errors import WorkerError


def test_message_is_copied_whichever_end_comes_first():
    first, second = connect(2)
    sent, early, late = torch.arange(3.0), torch.zeros(3), torch.zeros(3)
    receive = second.receive([early], 0)
    first.send([sent], 1).wait()
    receive.wait()
    first.send([sent + 1], 1)
    second.receive([late], 0).wait()
    assert early.tolist() == [0.0, 1.0, 2.0]
    assert late.tolist() == [1.0, 2.0, 3.0]


def test_messages_of_a_pair_arrive_in_order_and_pairs_do_not_mix():
    first, second, third = connect(3)
    buffers = [torch.zeros(1) for _ in range(3)]
    handles = [third.receive([buffers[0]], 0), third.receive([buffers[1]], 1), third.receive([buffers[2]], 0)]
    for end, value in ((second, 5.0), (first, 1.0), (first, 2.0)):
        end.send([torch.tensor([value])], 2)
    for handle in handles:
        handle.wait()
    assert [one.item() for one in buffers] == [1.0, 5.0, 2.0]


def test_handle_frees_its_tensors_after_the_wait():
    first, second = connect(2)
    handle = first.send([torch.zeros(1)], 1)
    second.receive([torch.zeros(1)], 0).wait()
    handle.wait()
    assert handle._transfer.tensors == ()
    assert handle.span is None


def test_device_that_stops_ends_the_waits_of_the_others_with_its_reason():
    first, second = connect(2)
    waits = second.receive([torch.zeros(1)], 0)
    first.close(ValueError("bad batch"))
    with pytest.raises(WorkerError, match="device 0 stopped: ValueError: bad batch"):
        waits.wait()
    with pytest.raises(WorkerError, match="device 0 stopped"):
        second.send([torch.zeros(1)], 0)
    second.close(KeyError("later"))  # the first reason is kept
    with pytest.raises(WorkerError, match="bad batch"):
        second.receive([torch.zeros(1)], 0)


@pytest.mark.parametrize("first_sends", [True, False])
def test_copy_that_fails_ends_the_wait_of_the_other_device_with_the_reason(first_sends):
    """Neither end is in the channel any more when the later thread copies."""
    first, second = connect(2)
    small, large = torch.zeros(2), torch.zeros(3)
    handle = first.send([small], 1) if first_sends else first.receive([small], 1)
    with pytest.raises(RuntimeError, match="size"):
        second.receive([large], 0) if first_sends else second.send([large], 0)
    second.close(RuntimeError("not reached"))
    assert handle._transfer.done.wait(timeout=5)  # else the next line would wait forever
    with pytest.raises(WorkerError, match=r"device 1 stopped: RuntimeError: .*size"):
        handle.wait()


def test_empty_message_is_sent():
    first, second = connect(2)
    second.receive([], 0)
    first.send([], 1).wait()
