"""Streams of devices: names, and the current streams that threads continue with."""

import contextlib

import pytest
import torch
from panpipe.backends import streams as module
from panpipe.backends.streams import CudaStreams, InheritedStreams, Streams, release_unused

FIRST, SECOND, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


class Fake(Streams):
    """Streams by number, and what is asked of them."""

    def __init__(self):
        super().__init__()
        self.made, self.used, self.released, self.now = [], [], [], {FIRST: "first", SECOND: "second"}

    def new(self, device, urgent):
        self.made.append((device, urgent))
        return len(self.made)

    def current(self, device):
        return self.now[device]

    @contextlib.contextmanager
    def using(self, *streams):
        self.used.append(streams)
        yield

    def release_unused(self, device):
        self.released.append(device)

    def record(self, stream, *, timed=False): ...
    def wait(self, stream, event): ...
    def upload(self, tensor, device): ...
    def download(self, tensor): ...
    def finish(self, stream): ...
    def synchronize(self, device): ...
    def elapsed_s(self, start, end): ...


@pytest.fixture
def fake(monkeypatch):
    made = Fake()
    monkeypatch.setitem(module._KINDS, "cuda", made)
    return made


def test_unused_memory_of_each_device_is_released_once(fake):
    release_unused([FIRST, CPU, FIRST, SECOND])
    assert sorted(fake.released, key=str) == [FIRST, SECOND]


def test_thread_continues_with_the_streams_of_its_caller(fake):
    fake.now = {FIRST: "mine", SECOND: "also mine"}
    inherited = InheritedStreams([FIRST, SECOND, CPU])
    fake.now = {FIRST: "default", SECOND: "also mine"}  # of the new thread
    with inherited.active(FIRST):
        pass
    assert fake.used == [("mine",)]  # the second device has its stream already
    fake.now[SECOND] = "default"
    with inherited.active(FIRST):
        pass
    assert fake.used[-1] == ("also mine", "mine")  # its own device last, which becomes the current one


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
