"""Streams and events: what orders work on a device whose host runs ahead of it.

The executor and the transports are written against `Streams`, never against ``torch.cuda``: a test puts an
implementation there that records who waits for what and proves that every read is ordered behind its write. The one
for CUDA below only passes on.

Memory: a tensor's memory belongs to the stream on which it was made, and is handed out again there as soon as the host
lets go of it. Panpipe keeps every tensor that another stream reads or writes until its own stream is ordered behind
that, and so needs no ``record_stream``: with that, when memory comes back would depend on when the host happens to ask,
and the peak of a step would be another one each time.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


class Streams(ABC):
    """Streams and events of one type of device."""

    def __init__(self) -> None:
        self._named: dict[tuple[Hashable, torch.device], Any] = {}

    def named(self, name: Hashable, device: torch.device, *, urgent: bool = False) -> Any:
        """The stream of this name on a device, made when it is first asked for: streams are few, and stay.

        Args:
            name: what it is for.
            device: where it is.
            urgent: whether what it does goes before what others do.
        """
        key = name, device
        found = self._named.get(key)
        return self._named.setdefault(key, self.new(device, urgent)) if found is None else found

    @abstractmethod
    def new(self, device: torch.device, urgent: bool) -> Any:
        """A new stream on a device; arguments as of `named`."""

    @abstractmethod
    def current(self, device: torch.device) -> Any:
        """The stream that this thread's work on a device goes to."""

    @abstractmethod
    def using(self, *streams: Any) -> AbstractContextManager[None]:
        """A context in which this thread's work goes to these streams, one for each of their devices."""

    @abstractmethod
    def record(self, stream: Any, *, timed: bool = False) -> Any:
        """An event behind everything that was issued to a stream so far.

        Args:
            stream: the stream.
            timed: whether `elapsed_s` will be asked about it.
        """

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Have what is issued to a stream from now on come behind an event. The host does not wait."""

    @abstractmethod
    def upload(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor on a device, copied on the current stream; the host does not wait for the copy."""

    @abstractmethod
    def download(self, tensor: Tensor) -> Tensor:
        """The tensor on the host, once everything issued to the current stream has run: the host waits."""

    @abstractmethod
    def finish(self, stream: Any) -> None:
        """Wait on the host until everything that was issued to a stream has run."""

    @abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Wait on the host until everything that was issued to a device has run."""

    @abstractmethod
    def elapsed_s(self, start: Any, end: Any) -> float:
        """Seconds between two timed events of one device. Waits for the second one."""


class CudaStreams(Streams):
    """CUDA's, by ``torch.cuda``."""

    def new(self, device: torch.device, urgent: bool) -> Any:
        # Of each priority PyTorch has 32 streams a device, and hands them out in turns: urgent ones are a set apart.
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
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def upload(self, tensor: Tensor, device: torch.device) -> Tensor:
        # From pageable memory the host would wait. The allocator of pinned memory keeps it until the copy has run.
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        held.copy_(tensor, non_blocking=True)
        self.finish(self.current(tensor.device))
        return held

    def finish(self, stream: Any) -> None:
        self.record(stream).synchronize()

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def elapsed_s(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


_KINDS: dict[str, Streams] = {"cuda": CudaStreams()}


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None where what was called has happened."""
    return _KINDS.get(device.type)


class InheritedStreams:
    """The streams that the work of the calling thread goes to, for threads that go on with it.

    A thread begins on device 0 and on the default stream of every device, and what it asks of a device there would come
    behind nothing that its caller has under way on another stream.

    Args:
        devices: those that the threads work on, or copy from.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._current: dict[torch.device, Any] = {}
        for device in devices:
            streams = streams_of(device)
            if streams is not None:
                self._current[device] = streams.current(device)

    @contextmanager
    def active(self, here: torch.device | None) -> Iterator[None]:
        """A context in which a thread's work goes to them, with ``here`` as the device that it is on, if any."""
        streams = None if here is None else streams_of(here)
        if streams is None or here not in self._current:
            yield
            return
        others = (stream for device, stream in self._current.items()
                  if device != here and stream != streams.current(device))  # fmt: skip
        with streams.using(*others, self._current[here]):
            yield
