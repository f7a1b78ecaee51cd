"""The contract of a backend: how tensors move between two devices of a pipeline.

A message is a list of tensors. Messages from one device to another arrive in the order in which they were sent, and
the receiver posts its receives in that order. Each ordered pair of devices is independent of all others. An all-reduce
sums over all devices of a transport, a broadcast sends from one to all others; a reduce-scatter leaves each device the
sum of its part, an all-gather gives all parts to all. The devices of a pipeline have one transport, the replicas of a
stage another.
Every operation returns a handle. After ``wait`` the caller's next operations see the bytes; on CUDA it orders streams
and need not block the host. `panpipe.backends.conformance` has a rule for each of these sentences.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

Pair = tuple[int, int]
"""An ordered pair of devices: sender, receiver."""


class Handle(Protocol):
    """An operation in flight. Handles may be waited for in any order."""

    def wait(self) -> None:
        """Return when the caller may read the received or summed tensors, or overwrite the sent ones.

        Raises:
            WorkerError: the peer stopped; raised within 10 s, with ``device N`` or ``rank N`` in the message. A
                transport that would wait forever sets `BackendKind.detects_dead_peers` to False.
        """


class Backend(ABC):
    """One device's end of a transport.

    Attributes:
        name: the transport's name in plans and in ``backend=``.
        device: index of this device among those of the transport: the position in the pipeline, or the replica.
        devices: how many there are.
        occupies_device: whether a message occupies the device until its counterpart is there, so that a host which
            waits for the device waits for the peer, too. All programs then run once before the first message.
    """

    name: ClassVar[str]
    occupies_device: bool = False
    device: int
    devices: int

    def connect(self, pairs: Iterable[Pair]) -> None:  # noqa: B027 - most transports connect all pairs by themselves
        """Prepare for messages between these pairs, in addition to those of earlier calls.

        All devices call it with the same pairs, before the first message of one of them.

        Raises:
            RequestError: the transport cannot have as many.
        """

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        """Start to send a message to device ``peer``; returns without waiting for its receive.

        The tensors may have any memory layout. The caller does not change them until it has waited for the handle.

        Raises:
            WorkerError: device ``peer`` is known to have stopped.
        """

    @abstractmethod
    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        """Start to receive the next message of device ``peer`` into contiguous buffers of its shapes and dtypes.

        Raises:
            WorkerError: device ``peer`` is known to have stopped.
        """

    def receive_now(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        """As `receive`, for a sum or another operation of all devices: these end as soon as all devices have called
        them, whether or not the others wait for their own handles.

        A transport whose receives start with their wait overrides it.
        """
        return self.receive(buffers, peer)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Start to sum a contiguous tensor over all devices, in place; the result has the same bits on all of them.

        All devices call it with the same shape and dtype, and in the same order relative to their messages, as if it
        were a message from each device to each. They do not touch the tensor until they have waited.
        This implementation sends the tensor from each device to each. That is efficient for small tensors and for two
        devices; a transport with a real all-reduce, which moves 2 (n − 1) / n times the bytes, overrides it.

        Raises:
            WorkerError: a device is known to have stopped.
        """
        return _Summing(self, tensor, {peer: tensor for peer in range(self.devices) if peer != self.device})

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> Handle:
        """Start to send tensors of device ``source`` to all others, which give contiguous buffers for them.

        All devices call it, in the same order relative to their sums and messages. They do not touch the tensors until
        they have waited. This implementation sends a message to each device.

        Raises:
            WorkerError: a device is known to have stopped.
        """
        if source != self.device:
            return self.receive_now(tensors, source)
        return _Together([self.send(tensors, peer) for peer in range(self.devices) if peer != source])

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        """Start to sum a contiguous tensor over all devices, in place; device d gets the d-th of equal parts.

        The first dimension is a multiple of the number of devices. After `wait` the other parts have unspecified
        values. Otherwise as `all_reduce`. This implementation sends each device its part, and adds in the order of the
        devices: (n − 1) / n times the bytes.

        Raises:
            WorkerError: a device is known to have stopped.
        """
        parts = tensor.chunk(self.devices) if tensor.numel() else ()
        sent = {peer: part for peer, part in enumerate(parts) if peer != self.device}
        return _Summing(self, parts[self.device] if parts else tensor, sent)

    def all_gather(self, tensor: Tensor) -> Handle:
        """Start to give the d-th of equal parts of device d's contiguous tensor to all devices, in place.

        Shapes and order as for `reduce_scatter`. This implementation sends the own part to each device.

        Raises:
            WorkerError: a device is known to have stopped.
        """
        parts = tensor.chunk(self.devices) if tensor.numel() else ()
        others = [peer for peer in range(self.devices) if peer != self.device and parts]
        handles = [self.receive_now([parts[peer]], peer) for peer in others]
        return _Together([*handles, *(self.send([parts[self.device]], peer) for peer in others)])

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Stop using the transport; further calls have no effect.

        With a failure, waits for this device raise it in the other threads of this process. Other processes detect that
        this one has ended.
        """


class _Together:
    """Several operations, or none."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        """See :class:`Handle`."""
        for handle in self._handles:
            handle.wait()


ENDED: Handle = _Together(())
"""The handle of an operation that has ended."""


class _Summing:
    """A sum over all devices, of which each receives the addends of the others and adds in the order of the devices.

    Args:
        total: this device's addend; the sum after `wait`.
        sent: every other device → the addend that it is sent.
    """

    def __init__(self, end: Backend, total: Tensor, sent: Mapping[int, Tensor]) -> None:
        self._total, self._own = total, end.device
        self._received = {peer: torch.empty_like(total, memory_format=torch.contiguous_format) for peer in sent}
        self._handles = [end.receive_now([self._received[peer]], peer) for peer in sent]
        self._handles += [end.send([tensor], peer) for peer, tensor in sent.items()]

    def wait(self) -> None:
        """See :class:`Handle`."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.wait()
        self._handles = []
        received, self._received = self._received, {}
        before = [received[device] for device in sorted(received) if device < self._own]
        if before:
            first, *rest = before
            for addend in (*rest, self._total):
                first.add_(addend)
            self._total.copy_(first)
        for device in sorted(received):
            if device > self._own:
                self._total.add_(received[device])
