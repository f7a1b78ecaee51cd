"""Where a device computes: the host itself on a CPU, streams of its own on CUDA.

On CUDA an action is only issued when its turn comes. The host runs ahead; streams keep the order within a queue, events
keep it between queues, and times are those of events::

    caller's stream ──begin──▶ load stream     microbatch 0 │ microbatch 1 │ …
            │                       │ 1              │ 2           │ 2
            └────────begin────▶ compute stream   F of microbatch 0 │ F of microbatch 1 │ … ──end──▶ caller's stream
                                    │ 3               ▲ 4
                                transport's streams ──┘

1. What is loaded overwrites what the step before read: it comes behind that step's compute.
2. The first action that reads a microbatch comes behind its copy to the device.
3. A message is copied behind what computed it, and behind the posting of its receive.
4. Its reader comes behind its copy; its sender lets go of it when the compute stream is behind the copy, too.

Not run on a GPU yet; tests prove the order with streams that record it.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...backends.contract import Handle
from ...backends.streams import Streams, streams_of


class ComputeQueue(ABC):
    """The compute queue of one device of a pipeline.

    Attributes:
        device: where its tensors are.
    """

    device: torch.device

    @abstractmethod
    def begin(self, traced: bool) -> None:
        """Have what follows come behind what the caller had issued. The thread that asks for a step calls it.

        Args:
            traced: whether marks will be asked for.
        """

    @abstractmethod
    def end(self) -> None:
        """Have what the caller issues from now on come behind everything in this queue; called by the same thread."""

    @abstractmethod
    def active(self) -> Any:
        """A context in which work of this thread goes to this queue."""

    @abstractmethod
    def mark(self) -> Any:
        """This moment in the queue."""

    @abstractmethod
    def nanoseconds(self, mark: Any) -> int:
        """When a mark was reached, on the monotonic clock. Waits for it."""

    @abstractmethod
    def load(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """Tensors of a batch on this device, and what `loaded` takes; the host does not wait for their copies."""

    @abstractmethod
    def loaded(self, ticket: Any) -> None:
        """Have what follows come behind a load."""

    @abstractmethod
    def upload(self, tensor: Tensor) -> Tensor:
        """A small tensor of the host on this device, for what follows; the host does not wait for its copy."""

    @abstractmethod
    def read(self, tensor: Tensor) -> Tensor:
        """The tensor on the host. Waits for everything in the queue: for the end of a step."""


class HostQueue(ComputeQueue):
    """The calling thread: what was called has happened."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def begin(self, traced: bool) -> None:
        """Nothing is under way."""

    def end(self) -> None:
        """Nothing is under way."""

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def mark(self) -> int:
        return time.perf_counter_ns()

    def nanoseconds(self, mark: Any) -> int:
        return int(mark)

    def load(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        return list(values), None

    def loaded(self, ticket: Any) -> None:
        """It is."""

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def read(self, tensor: Tensor) -> Tensor:
        return tensor


class StreamQueue(ComputeQueue):
    """A compute stream, and one for what is loaded.

    Args:
        device: where they are.
        number: of the device along the pipeline: several may share one GPU, and have streams of their own there.
        streams: makes and orders them.
    """

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
            streams.synchronize(self.device)  # what a step that broke off left under way; or to tie clocks together
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

    def read(self, tensor: Tensor) -> Tensor:
        return self._streams.download(tensor)


def compute_queue(device: torch.device, number: int) -> ComputeQueue:
    """The queue of a device of the pipeline.

    Args:
        device: where it computes.
        number: its number along the pipeline.
    """
    streams = streams_of(device)
    return HostQueue() if streams is None else StreamQueue(device, number, streams)


def compute_device(tensors: Iterable[Tensor]) -> torch.device:
    """The device that a model computes on: that of its first tensor that has data, else the CPU."""
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))


class Stopwatch:
    """Times what this thread has a device do, one thing after another.

    On streams a moment is an event: nobody waits between one measurement and the next, so that the device is as busy as
    in a step, and what is timed is what it did and not how it was asked to. A thread has a stream of its own for it:
    devices of a pipeline may share a GPU.

    Args:
        device: that works.
        clock: seconds, where what was called has happened.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock, self._streams = device, clock, streams_of(device)
        self._stream: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context for everything that is timed, and that makes what it works on."""
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
        """This moment."""
        return self._clock() if self._streams is None else self._streams.record(self._stream, timed=True)

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two moments. Waits for the second one."""
        return float(end - start) if self._streams is None else self._streams.elapsed_s(start, end)


def transfer_s(handle: Handle, device: torch.device) -> float | None:
    """Seconds that a transfer took on a device, by events around it; None where the transport has none."""
    span, streams = getattr(handle, "span", None), streams_of(device)
    return None if span is None or streams is None else streams.elapsed_s(*span)


def finished_s(device: torch.device) -> float:
    """Seconds on the monotonic clock, once everything that this thread's work on the device comes behind has run."""
    streams = streams_of(device)
    if streams is not None:
        streams.finish(streams.current(device))
    return time.perf_counter()
