"""The backend of one process: a thread for each device, and a copy where a message meets its receive.

    sender's thread                          receiver's thread
    1 send: leaves (tensors, ready) ──┐  ┌── 2 receive: leaves (buffers, free)
                                      ▼  ▼
                       3 whoever comes second copies, after ready and free
                                      │
    4 both handles see `done` ◄───────┴────► 4

On CUDA ready, free and done are events: the copy is issued on a stream of its own, and no host waits for a device.
"""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from attrs import define, field
from torch import Tensor

from ..core.errors import WorkerError
from .contract import Backend, Handle
from .kind import BackendKind


@define(eq=False)
class _Transfer:
    """One end of a message, and what both ends learn of its end."""

    tensors: Sequence[Tensor]
    ready: Any
    done: threading.Event = field(factory=threading.Event)
    done_event: Any = None


@define(eq=False)
class _Channel:
    """Messages from one device to another: sends without a receive yet, or receives without a send."""

    lock: threading.Lock = field(factory=threading.Lock)
    sends: deque[_Transfer] = field(factory=deque)
    receives: deque[_Transfer] = field(factory=deque)
    stream: Any = None


class Exchange:
    """What the devices of one process share.

    Args:
        devices: how many there are.
    """

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._channels = {(a, b): _Channel() for a in range(devices) for b in range(devices)}
        self.failure: tuple[int, BaseException] | None = None

    def channel(self, sender: int, receiver: int) -> _Channel:
        """The channel between two devices."""
        return self._channels[sender, receiver]

    def fail(self, device: int, failure: BaseException) -> None:
        """Wake everybody who waits: device ``device`` stopped."""
        if self.failure is None:
            self.failure = device, failure
        for channel in self._channels.values():
            with channel.lock:
                for transfer in (*channel.sends, *channel.receives):
                    transfer.done.set()

    def check(self) -> None:
        """Raise WorkerError if a device stopped."""
        if self.failure is not None:
            device, failure = self.failure
            raise WorkerError(f"device {device} stopped: {type(failure).__name__}: {failure}") from failure


class _MemcpyHandle:
    __slots__ = ("_exchange", "_transfer")

    def __init__(self, exchange: Exchange, transfer: _Transfer) -> None:
        self._exchange = exchange
        self._transfer = transfer

    def wait(self) -> None:
        self._transfer.done.wait()
        if self._exchange.failure is not None:
            self._exchange.check()
        if self._transfer.done_event is not None:
            torch.cuda.current_stream(self._transfer.tensors[0].device).wait_event(self._transfer.done_event)


class MemcpyBackend(Backend):
    """One device's end of the exchange.

    Args:
        exchange: shared by all devices of the process.
        device: this device's number.
    """

    name: ClassVar[str] = "memcpy"

    def __init__(self, exchange: Exchange, device: int) -> None:
        self.exchange = exchange
        self.device = device
        self.devices = exchange.devices

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        channel = self.exchange.channel(self.device, peer)
        return self._meet(channel, channel.sends, channel.receives, tensors, sending=True)

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        channel = self.exchange.channel(peer, self.device)
        return self._meet(channel, channel.receives, channel.sends, buffers, sending=False)

    def _meet(
        self, channel: _Channel, mine: deque[_Transfer], theirs: deque[_Transfer],
        tensors: Sequence[Tensor], sending: bool,
    ) -> Handle:  # fmt: skip
        transfer = _Transfer(tensors, _ready(tensors))
        with channel.lock:
            self.exchange.check()  # in here: a device that stops wakes what stands in the channel, under its lock
            other = theirs.popleft() if theirs else None
            if other is None:
                mine.append(transfer)
        if other is not None:
            if sending:
                _copy(channel, transfer, other)
            else:
                _copy(channel, other, transfer)
        return _MemcpyHandle(self.exchange, transfer)

    def close(self, failure: BaseException | None = None) -> None:
        if failure is not None:
            self.exchange.fail(self.device, failure)


def connect(devices: int) -> list[MemcpyBackend]:
    """The ends of all devices of this process."""
    exchange = Exchange(devices)
    return [MemcpyBackend(exchange, device) for device in range(devices)]


KIND = BackendKind(
    "memcpy", "copies between the threads of one process", threads=connect, device_types=frozenset({"cpu", "cuda"})
)


def _ready(tensors: Sequence[Tensor]) -> Any:
    """An event behind everything issued so far that the tensors depend on; None on CPU, where that has happened."""
    if tensors and tensors[0].is_cuda:
        return torch.cuda.current_stream(tensors[0].device).record_event()
    return None


def _copy(channel: _Channel, send: _Transfer, receive: _Transfer) -> None:
    cuda = next((t for t in (*send.tensors, *receive.tensors) if t.is_cuda), None)
    if cuda is not None and channel.stream is None:
        channel.stream = torch.cuda.Stream(cuda.device)
    with torch.cuda.stream(channel.stream) if cuda is not None else nullcontext():
        for event in (send.ready, receive.ready):
            if event is not None:
                channel.stream.wait_event(event)
        for source, target in zip(send.tensors, receive.tensors, strict=True):
            target.copy_(source, non_blocking=True)
            for tensor in (source, target):
                if tensor.is_cuda:
                    tensor.record_stream(channel.stream)
        if cuda is not None:
            send.done_event = receive.done_event = channel.stream.record_event()
    send.done.set()
    receive.done.set()
