"""Events that are used again, in place of ``torch.cuda.Event``."""

from typing import ClassVar

import torch
from panpipe.backends.streams import CudaStreams


class Recorded:
    made: ClassVar[list["Recorded"]] = []

    def __init__(self, enable_timing):
        self.timed, self.streams, self.waited = enable_timing, [], 0
        self.made.append(self)

    def record(self, stream):
        self.streams.append(stream)

    def synchronize(self):
        self.waited += 1

    def elapsed_time(self, end):
        return 1000.0 * (len(end.streams) - len(self.streams) + 1)


class Stream:
    def __init__(self, device):
        self.device, self.waits = device, []

    def wait_event(self, event):
        self.waits.append((event, len(event.streams)))


def streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(Recorded, "made", [])
    return CudaStreams()


def test_events_that_nobody_holds_are_recorded_again(monkeypatch):
    one, compute, load = streams(monkeypatch), Stream("cuda:0"), Stream("cuda:0")
    for _ in range(100):
        one.wait(compute, one.record(load))
        one.finish(compute)
    assert len(Recorded.made) == 1
    assert [count for _, count in compute.waits] == [2 * i + 1 for i in range(100)]  # of its record before the wait
    assert Recorded.made[0].waited == 100


def test_an_event_that_is_held_is_not_recorded_again(monkeypatch):
    one, stream = streams(monkeypatch), Stream("cuda:0")
    held = [one.record(stream) for _ in range(3)]
    assert len({id(each.event) for each in held}) == 3
    kept = held.pop().event
    assert one.record(stream).event is kept


def test_timed_events_and_those_of_other_devices_are_separate(monkeypatch):
    one, first, second = streams(monkeypatch), Stream("cuda:0"), Stream("cuda:1")
    for _ in range(3):
        one.record(first)
        one.record(second)
        start = one.record(first, timed=True)
        assert one.elapsed_s(start, one.record(first, timed=True)) > 0
        del start
    assert [each.timed for each in Recorded.made].count(True) == 2
    assert len(Recorded.made) == 4
    assert all(len(set(each.streams)) == 1 for each in Recorded.made)
