"""Backends that break one rule of the contract each, and keep all others."""

import functools
from collections import defaultdict, deque

import torch
from panpipe.backends.kind import BackendKind
from panpipe.backends.memcpy import Exchange, MemcpyBackend


class Summing(MemcpyBackend):
    """Adds up rightly, whatever happens to its messages."""

    def all_reduce(self, tensor):
        return MemcpyBackend(self.exchange, self.device).all_reduce(tensor)

    def reduce_scatter(self, tensor):
        return MemcpyBackend(self.exchange, self.device).reduce_scatter(tensor)

    def all_gather(self, tensor):
        return MemcpyBackend(self.exchange, self.device).all_gather(tensor)


class Swapping(Summing):
    """Every second message overtakes the one before it."""

    held = None

    def send(self, tensors, peer):
        if self.held is None and tensors[0].shape == (3,):
            self.held = tensors, peer
            return Later()
        handle = super().send(tensors, peer)
        if self.held is not None:
            late, self.held = self.held, None
            super().send(*late)
        return handle


class Later:
    """A handle that says that all is well."""

    def wait(self):
        """Return at once."""


class Blocking(Summing):
    """A send of a large message returns when that was received."""

    def send(self, tensors, peer):
        handle = super().send(tensors, peer)
        if tensors[0].nbytes > 1 << 20:
            handle.wait()
        return handle


class Answering(Summing):
    """Two receives are posted only where a message was sent for each: it takes turns."""

    def __init__(self, exchange, device):
        super().__init__(exchange, device)
        self.sent, self.posted, self.open = (defaultdict(int) for _ in range(3))

    def send(self, tensors, peer):
        self.sent[peer] += 1
        return super().send(tensors, peer)

    def receive(self, buffers, peer):
        if self.open[peer] and self.posted[peer] > self.sent[peer]:
            raise RuntimeError("it is not this device's turn to receive")
        self.posted[peer] += 1
        self.open[peer] += 1
        handle = super().receive(buffers, peer)

        def end():
            handle.wait()
            self.open[peer] -= 1

        return Ending(end)


class Ending:
    """A handle whose wait is a function."""

    def __init__(self, wait):
        self.wait = wait


class Bounded(Summing):
    """No more than fifty messages wait for their receives."""

    def send(self, tensors, peer):
        if len(self.exchange.channels[self.device, peer].sends) == 50:
            raise BufferError("50 messages are in flight")
        return super().send(tensors, peer)


class InTurn(Summing):
    """Receives can be waited for only in the order in which they were posted."""

    def __init__(self, exchange, device):
        super().__init__(exchange, device)
        self.queues = defaultdict(deque)

    def receive(self, buffers, peer):
        handle, queue = super().receive(buffers, peer), self.queues[peer]
        queue.append(handle)

        def wait():
            if queue[0] is not handle:
                raise RuntimeError("an earlier receive was not waited for")
            queue.popleft()
            handle.wait()

        return Ending(wait)


class Solid(Summing):
    """A tensor without elements cannot be sent."""

    def send(self, tensors, peer):
        if any(tensor.numel() == 0 for tensor in tensors):
            raise ValueError("there is nothing to send")
        return super().send(tensors, peer)


class Dense(Summing):
    """Reads memory as if every tensor were contiguous."""

    def send(self, tensors, peer):
        flat = [t.as_strided(t.shape, torch.empty(t.shape).stride(), t.storage_offset()) for t in tensors]
        return super().send(flat, peer)


class Rounding(Summing):
    """Bytes lose a bit."""

    def send(self, tensors, peer):
        return super().send([t & 254 if t.dtype is torch.uint8 else t for t in tensors], peer)


class Eager(Summing):
    """A send says that it is over before the message was copied."""

    def send(self, tensors, peer):
        super().send(tensors, peer)
        return Later()


class Nameless(MemcpyBackend):
    """Whoever waits for a dead device hears of something else."""

    def receive(self, buffers, peer):
        handle = super().receive(buffers, peer)

        def wait():
            try:
                handle.wait()
            except Exception as error:
                raise OSError("something went wrong") from error

        return Ending(wait)


class Spilling(Summing):
    """A receive writes beyond its buffer."""

    def receive(self, buffers, peer):
        handle = super().receive(buffers, peer)
        for buffer in buffers:
            room = buffer.untyped_storage().nbytes() // buffer.itemsize - buffer.storage_offset() - buffer.numel()
            if room > 0:
                buffer.as_strided((buffer.numel() + 1,), (1,))[-1] = 0
        return handle


class Disordered(MemcpyBackend):
    """Every device sums doubles in a different order."""

    def all_reduce(self, tensor):
        if tensor.dtype is not torch.float64:
            return super().all_reduce(tensor)
        others = [peer for peer in range(self.devices) if peer != self.device]
        parts = [torch.empty_like(tensor) for _ in others]
        handles = [self.send([tensor], peer) for peer in others]
        handles += [self.receive([part], peer) for part, peer in zip(parts, others, strict=True)]
        for handle in handles:
            handle.wait()
        for part in parts:
            tensor.add_(part)
        return Later()


class Forgetful(MemcpyBackend):
    """A sum of scalars says that it is over before it is."""

    def all_reduce(self, tensor):
        handle = super().all_reduce(tensor)
        return Later() if tensor.dim() == 0 else handle


class Single(MemcpyBackend):
    """One sum at a time."""

    busy = False

    def all_reduce(self, tensor):
        if self.busy:
            raise RuntimeError("another sum is under way")
        handle, self.busy = super().all_reduce(tensor), True

        def end():
            self.busy = False
            handle.wait()

        return Ending(end)


class Partial(MemcpyBackend):
    """A reduce-scatter leaves each device its own addend."""

    def reduce_scatter(self, tensor):
        return Later()


class Ungathered(MemcpyBackend):
    """An all-gather of many numbers gives nothing to others."""

    def all_gather(self, tensor):
        return Later() if tensor.numel() > 1_000 else super().all_gather(tensor)


class Silent(MemcpyBackend):
    """Broadcasts nothing."""

    def broadcast(self, tensors, source):
        return Ending(lambda: None)


class Late(MemcpyBackend):
    """A reduce-scatter starts with the wait for it."""

    def reduce_scatter(self, tensor):
        start = super().reduce_scatter
        return Ending(lambda: start(tensor).wait())


def _connect(cls, devices):
    exchange = Exchange(devices)
    return [cls(exchange, device) for device in range(devices)]


def unconnected(devices):
    raise OSError("no wire")


def kind(name: str) -> BackendKind:
    """The kind of one of the classes or functions above, by its name."""
    broken = globals()[name]
    threads = functools.partial(_connect, broken) if isinstance(broken, type) else broken
    return BackendKind(name.lower(), "broken on purpose", threads=threads)
