"""The contract of a backend: how tensors move between two devices of a pipeline.

A message is a list of tensors. Messages from one device to another arrive in the order in which they were sent, and
the receiver posts its receives in that order; the two directions of a pair, and pairs, know nothing of each other.
Everything is asynchronous by handle: ``wait`` makes what the caller does next see the bytes; on CUDA it orders streams
and need not block the host. `panpipe.backends.conformance` has a rule for each of these sentences.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor


class Handle(Protocol):
    """A communication under way. Handles may be waited for in any order."""

    def wait(self) -> None:
        """Return when the caller may read what was received, or overwrite what was sent.

        Raises:
            WorkerError: the device at the other end stopped; raised within 10 s, with ``device N`` or ``rank N`` in it.
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
        """Send a message to device ``peer``, and return before its receive is posted.

        The tensors, in any memory layout, stay unchanged until the handle was waited for.

        Raises:
            WorkerError: device ``peer`` is known to have stopped.
        """

    @abstractmethod
    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        """Receive the next message of device ``peer`` into contiguous buffers of its shapes and dtypes.

        Raises:
            WorkerError: device ``peer`` is known to have stopped.
        """

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Stop using the transport; again does no harm.

        With a failure, everybody who waits for this device raises it, if they share a process; a process that stops is
        missed by itself.
        """
