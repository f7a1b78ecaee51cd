"""Waits of a transport, noted with the rank that is waited for."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.backends.memcpy import connect
from panpipe.runtimes.watch.activity import Activity
from panpipe.runtimes.watch.watched_backend import WatchedBackend, watched


class Handle:
    """Notes the ranks of an activity while it waits."""

    span = (1, 2)

    def __init__(self, activity, fails=False):
        self.activity, self.fails, self.seen = activity, fails, None

    def wait(self):
        self.seen = self.activity.on
        if self.fails:
            raise OSError("lost")


def end_of(activity):
    """A transport of device 1 of three, whose handles note the ranks."""
    made = []

    def handle(*_):
        made.append(Handle(activity))
        return made[-1]

    calls = dict.fromkeys(("send", "receive", "all_reduce", "broadcast", "reduce_scatter", "all_gather"), handle)
    end = SimpleNamespace(device=1, devices=3, occupies_device=True, extra="own", made=made, **calls)
    return end


def test_wait_names_the_peer_and_ends_with_progress():
    activity = Activity()
    handle = Handle(activity)
    watched(handle, activity, (4,)).wait()
    assert (handle.seen, activity.on, activity.count) == ((4,), (), 1)
    with pytest.raises(OSError, match="lost"):
        watched(Handle(activity, fails=True), activity, (4,)).wait()
    assert (activity.on, activity.count) == ((), 2)
    assert watched(handle, activity, ()).span == (1, 2)


def test_ranks_of_each_operation():
    activity = Activity()
    end = end_of(activity)
    backend, tensor = WatchedBackend(end, activity, [10, 11, 12]), torch.zeros(1)
    for call in (
        lambda: backend.send([tensor], 2),
        lambda: backend.receive([tensor], 0),
        lambda: backend.all_reduce(tensor),
        lambda: backend.reduce_scatter(tensor),
        lambda: backend.all_gather(tensor),
        lambda: backend.broadcast([tensor], 1),
        lambda: backend.broadcast([tensor], 2),
    ):
        call().wait()
    assert [each.seen for each in end.made] == [(12,), (10,), (10, 12), (10, 12), (10, 12), (10, 12), (12,)]
    assert (backend.device, backend.devices, backend.occupies_device, backend.extra) == (1, 3, True, "own")


def test_frees_the_addends_of_the_transport_itself():
    end = connect(1)[0]
    end._addends.give_back(torch.zeros(2))
    WatchedBackend(end, Activity(), [0]).free_addends()
    assert end._addends._free == []


def test_messages_pass_as_without():
    activity = Activity()
    first, second = (WatchedBackend(end, activity, [0, 1]) for end in connect(2))
    buffer = torch.zeros(2)
    handle = second.receive([buffer], 0)
    first.send([torch.ones(2)], 1).wait()
    handle.wait()
    assert buffer.tolist() == [1.0, 1.0]
