"""The contract of a backend: how tensors move between two devices of a pipeline.

A message is a list of tensors. Messages from one device to another arrive in the order in which they were sent, and
the receiver posts its receives in that order. Everything is asynchronous by handle: ``wait`` makes what the caller does
next see the bytes; on CUDA it orders streams and need not block the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor


class Handle(Protocol):
    """A communication under way."""

    def wait(self) -> None:
        """Return when the caller may read what was received, or overwrite what was sent.

        Raises:
            WorkerError: the device at the other end stopped.
        """


class Backend(ABC):
    """One device's end of a transport.

    Attributes:
        name: under which plans and users know the transport.
        device: number of this device along the pipeline.
        devices: how many there are.
    """

    name: ClassVar[str]
    device: int
    devices: int

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        """Send a message to device ``peer``. The tensors stay unchanged until the handle was waited for."""

    @abstractmethod
    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        """Receive the next message of device ``peer`` into contiguous buffers of its shapes and dtypes."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` on every device with that of device ``source``; returns when this device has it."""

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Stop using the transport; with a failure, make everybody who waits for this device raise it."""
