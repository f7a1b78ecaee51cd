"""The compute queue of a device: the calling thread on a CPU, separate streams on CUDA.

On CUDA the host only issues actions and runs ahead. Streams keep the order within a queue, events the order between
queues, and times are those of events::

    caller's stream ──begin──▶ load stream     microbatch 0 │ microbatch 1 │ …
            │                       │ 1              │ 2           │ 2
            └────────begin────▶ compute stream   F of microbatch 0 │ F of microbatch 1 │ … ──end──▶ caller's stream
                                    │ 3               ▲ 4
                                transport's streams ──┘

1. A load overwrites tensors that the previous step read: it runs after that step's compute.
2. The first action that reads a microbatch runs after its copy to the device.
3. A message is copied after its computation, and after its receive was posted.
4. Its reader runs after the copy; its sender frees it when the compute stream is ordered after the copy, too.

Not run on a GPU yet; tests prove the order with streams that record it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...backends.contract import Handle
from ...backends.streams import Streams, streams_of


class ComputeQueue:
    """The compute queue of one device of a pipeline: on a CPU the calling thread, which runs operations synchronously.

    Attributes:
        device: where its tensors are.
        runs_ahead: whether the host issues operations before they run.
    """

    device = torch.device("cpu")
    runs_ahead = False

    def begin(self, traced: bool) -> None:
        """Make this queue wait for everything that the caller has issued so far; called by the thread of the step.

        Args:
            traced: whether marks will be used.
        """

    def end(self) -> None:
        """Make what the caller issues from now on wait for everything in this queue; called by the same thread."""

    def active(self) -> AbstractContextManager[None]:
        """A context in which this thread issues to this queue."""
        return nullcontext()

    def mark(self) -> Any:
        """A mark at the current position of the queue."""
        return time.perf_counter_ns()

    def nanoseconds(self, mark: Any) -> int:
        """The time at which a mark was reached, on the monotonic clock. Waits for it."""
        return int(mark)

    def load(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """A batch's tensors on this device, and a ticket for `loaded`; the host does not wait for their copies."""
        return list(values), None

    def loaded(self, ticket: Any) -> None:
        """Make what is issued to this queue from now on wait for a load."""

    def upload(self, tensor: Tensor) -> Tensor:
        """A small CPU tensor on this device, for what follows; the host does not wait for its copy."""
        return tensor

    def start_read(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copy a tensor to the host after what was issued so far; the host does not wait.

        Returns:
            Waits for the copy, and returns it.
        """
        return lambda: tensor

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor on the host. Waits for everything that was issued to the queue so far."""
        return self.start_read(tensor)()


class StreamQueue(ComputeQueue):
    """A compute stream and a load stream.

    Args:
        number: of the device along the pipeline: several may share one GPU, with separate streams.
    """

    runs_ahead = True

    def __init__(self, device: torch.device, number: int, streams: Streams) -> None:
        self.device = device
        self._streams = streams
        self._compute = streams.named(("compute", number), device)
        self._load = streams.named(("load", number), device)
        self._origin: tuple[Any, int] | None = None
        self._broken = False

    def begin(self, traced: bool) -> None:
        streams = self._streams
        if self._broken or traced:
            streams.synchronize(self.device)  # for operations of an aborted step; or to relate the two clocks
            self._broken = False
        before = streams.record(streams.current(self.device))
        streams.wait(self._compute, before)
        streams.wait(self._load, streams.record(self._compute))
        if traced:
            streams.synchronize(self.device)
            self._origin = streams.record(self._compute, timed=True), time.perf_counter_ns()

    def end(self) -> None:
        self._streams.wait(self._streams.current(self.device), self._streams.record(self._compute))

    @contextmanager
    def active(self) -> Iterator[None]:
        try:
            with self._streams.using(self._compute):
                yield
        except BaseException:
            self._broken = True
            raise

    def mark(self) -> Any:
        return self._streams.record(self._compute, timed=True)

    def nanoseconds(self, mark: Any) -> int:
        assert self._origin is not None
        event, at = self._origin
        return at + round(self._streams.elapsed_s(event, mark) * 1e9)

    def load(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        streams = self._streams
        with streams.using(self._load):
            found = [streams.upload(v, self.device) if isinstance(v, Tensor) else v for v in values]
        return found, streams.record(self._load)

    def loaded(self, ticket: Any) -> None:
        self._streams.wait(self._compute, ticket)

    def upload(self, tensor: Tensor) -> Tensor:
        return self._streams.upload(tensor, self.device)

    def start_read(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self._streams.download(tensor)


def compute_queue(device: torch.device, number: int) -> ComputeQueue:
    """The queue of a device of the pipeline."""
    streams = streams_of(device)
    return ComputeQueue() if streams is None else StreamQueue(device, number, streams)


def compute_device(tensors: Iterable[Tensor]) -> torch.device:
    """The device of a model: that of its first tensor with data, otherwise the CPU."""
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))


class Stopwatch:
    """Times operations that this thread issues to a device, one after another.

    On streams a time is an event: nothing waits between measurements, so that the device is as busy as in a step, and
    the time is that of the device and not of the host's calls. Each thread has a separate stream, because devices of a
    pipeline may share a GPU.

    Args:
        clock: in seconds, for a device that runs operations synchronously.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock, self._streams = device, clock, streams_of(device)
        self._stream: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context for the timed operations and those that create their inputs."""
        streams, device = self._streams, self._device
        if streams is None:
            yield
            return
        outside = streams.current(device)
        self._stream = streams.named(("profile", threading.current_thread().name), device)
        streams.wait(self._stream, streams.record(outside))
        try:
            with streams.using(self._stream):
                yield
        finally:
            streams.wait(outside, streams.record(self._stream))

    def now(self) -> Any:
        """The current time, as a number or an event."""
        return self._clock() if self._streams is None else self._streams.record(self._stream, timed=True)

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two times of `now`. Waits for the second one."""
        return float(end - start) if self._streams is None else self._streams.elapsed_s(start, end)


def transfer_s(handle: Handle, device: torch.device) -> float | None:
    """Seconds of a transfer on a device, by the events before and after it; None if the transport has none."""
    span, streams = getattr(handle, "span", None), streams_of(device)
    return None if span is None or streams is None else streams.elapsed_s(*span)


def finished_s(device: torch.device) -> float:
    """Seconds on the monotonic clock, after everything in this thread's current stream of the device has run."""
    streams = streams_of(device)
    if streams is not None:
        streams.finish(streams.current(device))
    return time.perf_counter()
