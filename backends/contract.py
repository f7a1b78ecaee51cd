"""The contract of a backend: how tensors move between two devices of a pipeline.

A message is a list of tensors. Messages from one device to another arrive in the order in which they were sent, and
the receiver posts its receives in that order; the two directions of a pair, and pairs, know nothing of each other.
Tensors are added up over all devices of a transport: those of a pipeline are one, and the replicas of a stage another.
Everything is asynchronous by handle: ``wait`` makes what the caller does next see the bytes; on CUDA it orders streams
and need not block the host. `panpipe.backends.conformance` has a rule for each of these sentences.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Handle(Protocol):
    """A communication under way. Handles may be waited for in any order."""

    def wait(self) -> None:
        """Return when the caller may read what was received or added up, or overwrite what was sent.

        Raises:
            WorkerError: the device at the other end stopped; raised within 10 s, with ``device N`` or ``rank N`` in it.
                A transport that would wait on says so (`BackendKind.misses_the_dead`).
        """


class Backend(ABC):
    """One device's end of a transport.

    Attributes:
        name: under which plans and users know the transport.
        device: number of this device among those that it connects: along the pipeline, or of the replica.
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

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Add a contiguous tensor of numbers up over all devices, in place: to the same bits on all of them.

        All devices call it with the same shape and dtype, in one order, in which it counts as a message from each to
        each, and leave the tensor alone until they waited.
        This one sends the tensor from each device to each, which is right for a few numbers and for two devices; a
        transport that has an all-reduce of its own, of 2 (n − 1) / n times the bytes, overrides it.

        Raises:
            WorkerError: a device is known to have stopped.
        """
        return _Summing(self, tensor)

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Stop using the transport; again does no harm.

        With a failure, everybody who waits for this device raises it, if they share a process; a process that stops is
        missed by itself.
        """


class _Summing:
    """The sum of a tensor that every device sends to every other; each adds up in the order of their numbers."""

    def __init__(self, end: Backend, tensor: Tensor) -> None:
        self._tensor, self._own = tensor, end.device
        others = [peer for peer in range(end.devices) if peer != end.device]
        self._parts = {peer: torch.empty_like(tensor) for peer in others}
        self._handles = [end.receive([self._parts[peer]], peer) for peer in others]
        self._handles += [end.send([tensor], peer) for peer in others]

    def wait(self) -> None:
        """See :class:`Handle`."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.wait()
        self._handles = []
        self._parts[self._own] = self._tensor.clone()
        first, *rest = (self._parts.pop(device) for device in sorted(self._parts))
        self._tensor.copy_(first)
        for part in rest:
            self._tensor.add_(part)
