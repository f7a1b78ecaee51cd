"""The compute queue of a CPU, the kind of queue of a device, and a stopwatch on it and on streams."""

import pytest
import torch
from panpipe.backends import streams
from panpipe.runtimes.devices.compute import (
    HostQueue,
    Stopwatch,
    StreamQueue,
    compute_device,
    compute_queue,
    finished_s,
    transfer_s,
)
from torch import nn

from ...support.backends.watched_streams import WatchedStreams

CPU = torch.device("cpu")


@pytest.fixture
def recorded(monkeypatch):
    found = WatchedStreams()
    monkeypatch.setitem(streams._KINDS, "cpu", found)
    return found


def test_stopwatch_records_events_on_a_separate_stream_per_thread(recorded):
    watch = Stopwatch(CPU)
    with recorded.using(recorded.current(CPU)):
        x = torch.randn(4)
        with watch.active():
            start = watch.now()
            y = x + 1
            y = y * 2
            end = watch.now()
        y.add_(1)
    assert watch.between(start, end) == pytest.approx(2e-6)
    assert recorded.problems == []
    assert [name for name in recorded.operators if isinstance(name, tuple)] == [("profile", "MainThread")]


def test_stopwatch_on_a_cpu_has_the_time_of_its_clock():
    ticks = iter([3.0, 5.5])
    watch = Stopwatch(CPU, lambda: next(ticks))
    with watch.active():
        start, end = watch.now(), watch.now()
    assert watch.between(start, end) == 2.5


def test_host_queue_runs_operations_at_once_and_copies_nothing():
    queue, tensor = HostQueue(), torch.ones(2)
    queue.begin(True)
    with queue.active():
        loaded, ticket = queue.load([tensor, 7])
        queue.loaded(ticket)
        first, second = queue.mark(), queue.mark()
    queue.end()
    assert (loaded[0] is tensor, loaded[1]) == (True, 7)
    assert queue.upload(tensor) is tensor
    assert queue.read(tensor) is tensor
    assert queue.nanoseconds(first) <= queue.nanoseconds(second)
    assert queue.device == CPU


def test_device_with_streams_has_a_queue_of_streams(recorded):
    assert isinstance(compute_queue(CPU, 0), StreamQueue)
    recorded_queue = compute_queue(CPU, 1)
    assert recorded_queue.device == CPU


def test_device_without_streams_has_a_host_queue():
    assert isinstance(compute_queue(CPU, 0), HostQueue)


def test_device_of_a_model_is_that_of_its_first_tensor_with_data():
    meta = nn.Parameter(torch.empty(2, device="meta"))
    assert compute_device([meta, nn.Parameter(torch.ones(1))]) == CPU
    assert compute_device([meta]) == CPU
    assert compute_device([]) == CPU


def test_transfer_has_a_time_where_transport_and_device_have_events(recorded):
    class Timed:
        span = (0, 0)

        def wait(self):
            pass

    with recorded.using(recorded.current(CPU)):
        start = recorded.record(recorded.current(CPU), timed=True)
        torch.ones(2) + 1
        end = recorded.record(recorded.current(CPU), timed=True)
    Timed.span = start, end
    assert transfer_s(Timed(), CPU) == pytest.approx(1e-6, abs=2e-6)
    assert transfer_s(object(), CPU) is None


def test_transfer_on_a_cpu_has_no_time_of_its_own():
    class Timed:
        span = (0, 0)

    assert transfer_s(Timed(), CPU) is None
    assert finished_s(CPU) <= finished_s(CPU)
