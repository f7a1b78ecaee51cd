"""What a device does now, and which ranks it waits for.

The working thread writes its `Activity` without a lock and without reading a clock; other threads read it. A change of
``count`` or ``on`` is progress. `QuietTime` measures how long there was none::

    working thread   what = 1F0, on = (0,)  ···············  on = (), count + 1
    watch's thread      │ 0.5 s │ 1.0 s │ 1.5 s │ 2.0 s │       │ 0.0 s

`WatchedBackend` records each of its waits in the device's `Activity`, with the rank that it waits for.
"""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define
from torch import Tensor

from ...backends.contract import Backend, Handle, Pair
from ...core.capture.values.code_origin import is_users_own


@define(eq=False, slots=True)
class Activity:
    """What a device does.

    Args:
        what: the current action or phase; any object with a text.
        on: the ranks (devices, between threads) that it waits for; empty while it computes.
        count: increases with every action and after every wait.
        method: the pipeline's method that runs, such as ``step 4``; empty in the user's code.
        last: the method that ran before.
        stages: the stages of the device.
        thread: identifier of the working thread.
        computing: whether it runs a computation of panpipe's own, such as a search, of which the processor time is
            progress.
    """

    what: object = ""
    on: tuple[int, ...] = ()
    count: int = 0
    method: str = ""
    last: str = ""
    stages: tuple[int, ...] = ()
    thread: int | None = None
    computing: bool = False

    def doing(self, what: object) -> None:
        """Note the start of an action or of a phase."""
        self.what = what
        self.count += 1

    @contextmanager
    def inside(self, method: str) -> Iterator[None]:
        """A context in which a method of the pipeline runs."""
        outer, self.method, self.what = self.method, method, ""
        self.thread = threading.get_ident()
        self.count += 1
        try:
            yield
        finally:
            self.last, self.method, self.what = self.method, outer, ""
            self.count += 1

    @contextmanager
    def waiting(self, on: tuple[int, ...], what: object = None) -> Iterator[None]:
        """A context in which the device waits for other ranks.

        Args:
            what: the phase; the current one if None.
        """
        before = self.on, self.what
        self.on = on
        self.doing(self.what if what is None else what)
        try:
            yield
        finally:
            self.on, self.what = before
            self.count += 1

    def text(self) -> str:
        """The method and the action: ``in step 4 at 1F0``; in the user's code ``outside of panpipe after step 4``."""
        what = str(self.what)
        if self.method:
            return f"in {self.method}" + (f" at {what}" if what else "")
        return "outside of panpipe" + (f" after {self.last}" if self.last else "")

    def line(self) -> str:
        """The innermost line of the working thread that is neither panpipe's nor a library's, as ``train.py:31 in
        load``; empty if it cannot be seen."""
        frame = sys._current_frames().get(self.thread or threading.main_thread().ident or 0)
        while frame is not None:
            path = frame.f_code.co_filename
            if not path.startswith("<") and is_users_own(path):  # other code is generated
                return f"{Path(path).name}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        return ""


HERE = Activity()
"""The activity of this process as a rank. Threads of one process have one for each device (`ThreadTeam`)."""


class QuietTime:
    """The seconds without a change of something, as `update` has seen it.

    A time in which this process was stopped, or got no processor, does not count: of the time between two updates at
    most ``step_s`` counts.

    Args:
        step_s: the most seconds that count between two updates.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._seen: object = None
        self._at = time.monotonic()
        self.seconds = 0.0

    def update(self, seen: object) -> float:
        """Compare with what was seen before.

        Returns:
            The seconds since it changed.
        """
        now = time.monotonic()
        self.seconds += min(now - self._at, self._step_s)
        self._at = now
        if seen != self._seen:
            self._seen, self.seconds = seen, 0.0
        return self.seconds


@define(eq=False)
class Watched:
    """A handle whose wait is noted. Other attributes, such as ``span``, are the transport's own."""

    _handle: Handle
    _activity: Activity
    _on: tuple[int, ...]

    def wait(self) -> None:
        """See :class:`Handle`."""
        activity = self._activity
        before, activity.on = activity.on, self._on
        try:
            self._handle.wait()
        finally:
            activity.on = before
            activity.count += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class WatchedBackend(Backend):
    """A device's end of a transport, with noted waits.

    Args:
        numbers: for each device of the transport its number in the activity.
    """

    def __init__(self, end: Backend, activity: Activity, numbers: Sequence[int]) -> None:
        self.end, self._activity = end, activity
        self.device, self.devices = end.device, end.devices
        self.occupies_device = end.occupies_device  # `__getattr__` is not called for what `Backend` defines
        self._peers = [(number,) for number in numbers]
        self._others = tuple(number for device, number in enumerate(numbers) if device != end.device)

    def connect(self, pairs: Iterable[Pair]) -> None:
        with self._activity.waiting(self._others, "the connection of the ranks"):
            self.end.connect(pairs)

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        return Watched(self.end.send(tensors, peer), self._activity, self._peers[peer])

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        return Watched(self.end.receive(buffers, peer), self._activity, self._peers[peer])

    def all_reduce(self, tensor: Tensor) -> Handle:
        return Watched(self.end.all_reduce(tensor), self._activity, self._others)

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> Handle:
        on = self._others if source == self.device else self._peers[source]
        return Watched(self.end.broadcast(tensors, source), self._activity, on)

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        return Watched(self.end.reduce_scatter(tensor), self._activity, self._others)

    def all_gather(self, tensor: Tensor) -> Handle:
        return Watched(self.end.all_gather(tensor), self._activity, self._others)

    def close(self, failure: BaseException | None = None) -> None:
        self.end.close(failure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.end, name)
