"""Streams of devices: names, and the current streams that threads continue with."""

from unittest import mock

import pytest
import torch
from panpipe.backends import streams as module
from panpipe.backends.streams import CudaStreams, InheritedStreams, Streams

FIRST, SECOND, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


@pytest.fixture
def fake(monkeypatch):
    """Streams by name: ``now`` of each device."""
    made = mock.create_autospec(Streams, instance=True)
    made.now = {FIRST: "mine", SECOND: "also mine"}
    made.current.side_effect = lambda device: made.now[device]
    monkeypatch.setitem(module._KINDS, "cuda", made)
    return made


def test_thread_continues_with_the_streams_of_its_caller(fake):
    inherited = InheritedStreams([FIRST, SECOND, CPU])
    fake.now = {FIRST: "default", SECOND: "also mine"}  # of the new thread
    with inherited.active(FIRST):
        pass
    assert fake.using.mock_calls[0] == mock.call("mine")  # the second device has its stream already
    fake.now[SECOND] = "default"
    with inherited.active(FIRST):
        pass
    assert fake.using.call_args == mock.call("also mine", "mine")  # its own device last, which becomes the current one


def test_urgent_streams_of_cuda_have_a_higher_priority(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append((device, priority)))
    CudaStreams().new(FIRST, True)
    CudaStreams().new(FIRST, False)
    assert made == [(FIRST, -1), (FIRST, 0)]


def test_times_of_cuda_are_seconds():
    class Event:
        def __init__(self):
            self.event, self.waited = self, False

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, end):
            assert end.waited
            return 250.0

    assert CudaStreams().elapsed_s(Event(), Event()) == 0.25
