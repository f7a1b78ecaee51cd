"""Reuse of CUDA events, because creating one takes longer than recording it.

An event can be recorded again when nothing references it any more: a stream that waits for it was given its position at
that time. Timed events, which a trace alone needs, are a separate set; so are those of each device, as CUDA requires.
"""

from collections.abc import Callable
from typing import Any


class Event:
    """A recorded event. When the last reference is gone, its event is used again.

    Args:
        free: where it goes.
    """

    __slots__ = ("_free", "event")

    def __init__(self, event: Any, free: list[Any]) -> None:
        self.event, self._free = event, free

    def __del__(self) -> None:
        self._free.append(self.event)


class Events:
    """The events of a type of device. Threads may share it: appending to a list and popping from it are atomic.

    Args:
        create: creates an event, given whether it is timed.
    """

    def __init__(self, create: Callable[[bool], Any]) -> None:
        self._create = create
        self._free: dict[tuple[Any, bool], list[Any]] = {}

    def record(self, stream: Any, timed: bool) -> Event:
        """An event after everything that was issued to a stream.

        Args:
            stream: with the attribute ``device``.
            timed: whether the time of the event will be read.
        """
        free = self._free.setdefault((stream.device, timed), [])
        try:
            event = free.pop()
        except IndexError:
            event = self._create(timed)
        event.record(stream)
        return Event(event, free)
