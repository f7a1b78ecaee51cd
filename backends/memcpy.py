"""The backend of one process: a thread for each device; a message is one copy into the receiver's buffers.

    sender's thread                          receiver's thread
    1 send: queues (tensors, ready) ──┐  ┌── 2 receive: queues (buffers, free)
                                      ▼  ▼
                       3 the later thread copies, after ready and free
                                      │
    4 both handles see `done` ◄───────┴────► 4

On CUDA ready, free and done are events: the copy is issued on a separate stream, and no host waits for a device. A pair
has a stream on each of its GPUs, because PyTorch orders a copy between GPUs after the current streams of both.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from attrs import define, field
from torch import Tensor

from ..core.errors import WorkerError, described
from .contract import Backend, Handle
from .kind import BackendKind
from .streams import streams_of


@define(eq=False)
class _Transfer:
    """One end of a message, and its handle.

    Args:
        tensors: the tensors to send, or the buffers to receive into.
        ready: the event after which they may be read or written; None for devices without streams.
        span: timed events before and after the copy, on the sender's device; None for devices without streams.
    """

    exchange: "Exchange"
    tensors: Sequence[Tensor]
    ready: Any
    done: threading.Event = field(factory=threading.Event)
    span: tuple[Any, Any] | None = None

    def wait(self) -> None:
        """See :class:`Handle`."""
        self.done.wait()
        self.exchange.check()
        if self.span is not None and self.tensors:
            device = self.tensors[0].device
            streams = streams_of(device)
            assert streams is not None
            streams.wait(streams.current(device), self.span[1])
        self.tensors = ()  # frees them: a trace keeps the handle for its span


@define(eq=False)
class _Channel:
    """Messages from one device to another: sends without a receive yet, or receives without a send."""

    lock: threading.Lock = field(factory=threading.Lock)
    sends: deque[_Transfer] = field(factory=deque)
    receives: deque[_Transfer] = field(factory=deque)


class Exchange:
    """The channels between the devices of one process, and their common failure."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.channels = {(a, b): _Channel() for a in range(devices) for b in range(devices)}
        self.failure: tuple[int, BaseException] | None = None

    def fail(self, device: int, failure: BaseException) -> None:
        """Record that device ``device`` stopped, and wake all waiting threads."""
        if self.failure is None:
            self.failure = device, failure
        for channel in self.channels.values():
            with channel.lock:
                for transfer in (*channel.sends, *channel.receives):
                    transfer.done.set()

    def check(self) -> None:
        """Raise WorkerError if a device stopped."""
        if self.failure is not None:
            device, failure = self.failure
            raise WorkerError(f"device {device} stopped: {described(failure)}") from failure


class MemcpyBackend(Backend):
    """One device's end of the exchange.

    Args:
        exchange: shared by all devices of the process.
    """

    name: ClassVar[str] = "memcpy"

    def __init__(self, exchange: Exchange, device: int) -> None:
        self.exchange = exchange
        self.device = device
        self.devices = exchange.devices

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        return self._meet((self.device, peer), tensors, sending=True)

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        return self._meet((peer, self.device), buffers, sending=False)

    def _meet(self, pair: tuple[int, int], tensors: Sequence[Tensor], *, sending: bool) -> Handle:
        channel = self.exchange.channels[pair]
        mine, theirs = (channel.sends, channel.receives) if sending else (channel.receives, channel.sends)
        transfer = _Transfer(self.exchange, tensors, _ready(tensors))
        with channel.lock:
            self.exchange.check()  # under the lock: `fail` wakes the transfers that are in the channel under it
            other = theirs.popleft() if theirs else None
            if other is None:
                mine.append(transfer)
        if other is not None:
            send, receive = (transfer, other) if sending else (other, transfer)
            try:
                _copy(pair, send, receive)
            except BaseException as error:
                self.exchange.fail(self.device, error)
                other.done.set()  # it is in no channel any more, so that `fail` does not wake it
                raise
        return transfer

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
    """An event after everything issued so far that the tensors depend on; None if it has already run."""
    if not tensors:
        return None
    streams = streams_of(tensors[0].device)
    return None if streams is None else streams.record(streams.current(tensors[0].device))


def _copy(pair: tuple[int, int], send: _Transfer, receive: _Transfer) -> None:
    """Copy a message, or issue its copy, between a pair of devices."""
    streams = streams_of(send.tensors[0].device) if send.tensors else None
    if streams is None:
        _copy_each(send, receive)
    else:
        source, target = send.tensors[0].device, receive.tensors[0].device
        queue, other = (streams.named(("memcpy", *pair), device, urgent=True) for device in (source, target))
        with streams.using(other, queue):
            for event in (send.ready, receive.ready):
                streams.wait(queue, event)
            start = streams.record(queue, timed=True)
            _copy_each(send, receive)
            send.span = receive.span = start, streams.record(queue, timed=True)
    send.done.set()
    receive.done.set()


def _copy_each(send: _Transfer, receive: _Transfer) -> None:
    for source, target in zip(send.tensors, receive.tensors, strict=True):
        target.copy_(source, non_blocking=True)
