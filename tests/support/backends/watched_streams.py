"""Recorded streams that also record when their times were read."""

from .recorded_streams import RecordedStreams


class WatchedStreams(RecordedStreams):
    """Recorded streams that list in which order moments were recorded and read.

    Attributes:
        asked: ``moment`` for a timed event, ``wait`` for a time between two.
    """

    def __init__(self):
        super().__init__()
        self.asked = []

    def record(self, stream, *, timed=False):
        if timed:
            self.asked.append("moment")
        return super().record(stream, timed=timed)

    def elapsed_s(self, start, end):
        self.asked.append("wait")
        return super().elapsed_s(start, end)

    def synchronize(self, device):
        raise AssertionError("a measurement waits for the whole device")
