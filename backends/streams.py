"""Streams and events: they order operations on a device whose host runs ahead of it.

The executor and the transports use `Streams`, never ``torch.cuda`` directly: a test replaces it by an implementation
that records all waits and proves that every read is ordered after its write. `CudaStreams` below only forwards calls.

Memory: a tensor's memory belongs to the stream on which it was allocated, and can be reused there as soon as the host
frees the tensor. Panpipe keeps every tensor that another stream reads or writes until its own stream is ordered after
that. It therefore needs no ``record_stream``, with which the time of reuse would depend on the host's timing, and the
peak of a step would vary.

CUDA events are used again, because creating one takes longer than recording it. An event can be recorded again when
nothing references it any more: a stream that waits for it was given its position at that time. Timed events, which a
trace alone needs, are a separate set; so are those of each device, as CUDA requires.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


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


class Streams(ABC):
    """Streams and events of one type of device."""

    def __init__(self) -> None:
        self._named: dict[tuple[Hashable, torch.device], Any] = {}

    def named(self, name: Hashable, device: torch.device, *, urgent: bool = False) -> Any:
        """The stream of this name on a device, created on first use and then kept: streams are few.

        Args:
            name: its purpose.
            device: its device.
            urgent: whether it has a higher priority than other streams.
        """
        key = name, device
        found = self._named.get(key)
        return self._named.setdefault(key, self.new(device, urgent)) if found is None else found

    @abstractmethod
    def new(self, device: torch.device, urgent: bool) -> Any:
        """A new stream on a device; arguments as in `named`."""

    @abstractmethod
    def current(self, device: torch.device) -> Any:
        """This thread's current stream on a device."""

    @abstractmethod
    def using(self, *streams: Any) -> AbstractContextManager[None]:
        """A context in which these are this thread's current streams, one for each of their devices."""

    @abstractmethod
    def record(self, stream: Any, *, timed: bool = False) -> Any:
        """An event after everything that was issued to a stream so far.

        Args:
            stream: the stream.
            timed: whether `elapsed_s` can be used with it.
        """

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Make everything issued to a stream from now on run after an event. The host does not wait."""

    @abstractmethod
    def upload(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor on a device, copied on the current stream; the host does not wait for the copy."""

    @abstractmethod
    def download(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copy a tensor to the host, on the current stream; the host does not wait.

        Returns:
            Waits on the host until the copy has run, and returns it.
        """

    @abstractmethod
    def finish(self, stream: Any) -> None:
        """Wait on the host until everything that was issued to a stream has run."""

    @abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Wait on the host until everything that was issued to a device has run."""

    def release_unused(self, device: torch.device) -> None:  # noqa: B027 - a device without an allocator keeps none
        """Return memory that the allocator keeps and no tensor uses to a device. Waits for the device."""

    @abstractmethod
    def elapsed_s(self, start: Any, end: Any) -> float:
        """Seconds between two timed events of one device. Waits for the second one."""


class CudaStreams(Streams):
    """Streams and events of CUDA, through ``torch.cuda``."""

    def __init__(self) -> None:
        super().__init__()
        self._events = Events(lambda timed: torch.cuda.Event(enable_timing=timed))

    def new(self, device: torch.device, urgent: bool) -> Any:
        # PyTorch has 32 streams per device and priority, and assigns them in turns: urgent ones are a separate set.
        return torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def current(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    @contextmanager
    def using(self, *streams: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def record(self, stream: Any, *, timed: bool = False) -> Any:
        return self._events.record(stream, timed)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event.event)

    def upload(self, tensor: Tensor, device: torch.device) -> Tensor:
        # The host would wait for a copy from pageable memory. The allocator keeps pinned memory until the copy has run.
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def download(self, tensor: Tensor) -> Callable[[], Tensor]:
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        held.copy_(tensor, non_blocking=True)
        copied = self.record(self.current(tensor.device))

        def wait() -> Tensor:
            copied.event.synchronize()
            return held

        return wait

    def finish(self, stream: Any) -> None:
        self.record(stream).event.synchronize()

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def release_unused(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()

    def elapsed_s(self, start: Any, end: Any) -> float:
        end.event.synchronize()
        return float(start.event.elapsed_time(end.event)) / 1e3


_KINDS: dict[str, Streams] = {"cuda": CudaStreams()}


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None for a device that runs operations synchronously."""
    return _KINDS.get(device.type)


def release_unused(devices: Iterable[torch.device]) -> None:
    """Return unused memory to devices, such as that of pipelines that were only measured; for use between steps.

    Otherwise the allocator would do it in the middle of a step, when it finds no free block, and the host would wait.
    """
    for device in set(devices):
        streams = streams_of(device)
        if streams is not None:
            gc.collect()  # captured graphs contain reference cycles
            streams.release_unused(device)


class InheritedStreams:
    """The calling thread's current streams, for threads that continue its operations.

    A new thread has device 0 and the default stream of every device. Its operations would not be ordered after those
    that its caller issued to other streams.

    Args:
        devices: those that the threads use, or copy from.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._current: dict[torch.device, Any] = {}
        for device in devices:
            streams = streams_of(device)
            if streams is not None:
                self._current[device] = streams.current(device)

    @contextmanager
    def active(self, here: torch.device | None) -> Iterator[None]:
        """A context in which they are the thread's current streams, with ``here`` as its current device, if any."""
        streams = None if here is None else streams_of(here)
        if streams is None or here not in self._current:
            yield
            return
        others = (stream for device, stream in self._current.items()
                  if device != here and stream != streams.current(device))  # fmt: skip
        with streams.using(*others, self._current[here]):
            yield
