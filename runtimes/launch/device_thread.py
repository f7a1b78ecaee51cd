"""The thread of a device, if all devices are in one process: it runs calls one after another.

It is a daemon, unlike a thread of ``ThreadPoolExecutor``: one that hangs does not keep the process from ending.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Call = tuple[Callable[[int], None], int, "Future[None]"]


class DeviceThread:
    """A thread that runs calls in order; it ends when this object is collected, or by `shutdown`.

    Args:
        device: its number.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=_run, args=(self._calls,), name=f"panpipe device {device}", daemon=True).start()
        self._end = weakref.finalize(self, self._calls.put, None)

    def submit(self, work: Callable[[int], None]) -> "Future[None]":
        """Call a function with the device's number, which raises nothing."""
        done: Future[None] = Future()
        self._calls.put((work, self._device, done))
        return done

    def shutdown(self) -> None:
        """End the thread after the calls so far; returns without waiting."""
        self._end()


def _run(calls: "SimpleQueue[Any]") -> None:
    while (call := calls.get()) is not None:
        work, device, done = call
        work(device)
        done.set_result(None)
        del call, work, done  # what they refer to is not kept until the next call
