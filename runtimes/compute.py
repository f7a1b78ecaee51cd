"""Where a device computes: the host itself on a CPU, a stream of its own on CUDA.

On CUDA an action is only issued when its turn comes. The host runs ahead; streams keep the order within a queue, events
keep it between queues, and times are those of events.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class ComputeQueue(ABC):
    """The compute queue of one device of a pipeline.

    Attributes:
        device: where its tensors are.
    """

    device: torch.device

    @abstractmethod
    def active(self) -> Any:
        """A context in which work goes to this queue: behind what the caller had issued, before what it issues next."""

    @abstractmethod
    def mark(self) -> Any:
        """This moment in the queue."""

    @abstractmethod
    def nanoseconds(self, mark: Any) -> int:
        """When a mark was reached, on the monotonic clock. Waits for it."""


class HostQueue(ComputeQueue):
    """The calling thread: what was called has happened."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def mark(self) -> int:
        return time.perf_counter_ns()

    def nanoseconds(self, mark: Any) -> int:
        return int(mark)


class StreamQueue(ComputeQueue):
    """A CUDA stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._origin: tuple[Any, int] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def mark(self) -> Any:
        if self._origin is None:  # ties the device's clock to the host's
            torch.cuda.synchronize(self.device)
            self._origin = self._event(), time.perf_counter_ns()
        return self._event()

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def nanoseconds(self, mark: Any) -> int:
        assert self._origin is not None
        event, at = self._origin
        mark.synchronize()
        return at + int(event.elapsed_time(mark) * 1e6)


def compute_queue(device: torch.device) -> ComputeQueue:
    """A new queue on a device."""
    return StreamQueue(device) if device.type == "cuda" else HostQueue()


def compute_device(tensors: Iterable[Tensor]) -> torch.device:
    """The device that a model computes on: that of its first tensor that has data, else the CPU."""
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))


def finished_s(device: torch.device) -> float:
    """Seconds on the monotonic clock, once everything issued to the device has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
