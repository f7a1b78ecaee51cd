"""Backends that break the contract in one way each, and do the rest right."""

import torch
from panpipe.backends.kind import BackendKind
from panpipe.backends.memcpy import Exchange, MemcpyBackend


class Swapping(MemcpyBackend):
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


class Blocking(MemcpyBackend):
    """A send returns when its message was received."""

    def send(self, tensors, peer):
        handle = super().send(tensors, peer)
        handle.wait()
        return handle


class Rounding(MemcpyBackend):
    """Doubles lose half of their bits."""

    def send(self, tensors, peer):
        return super().send([t.float().double() if t.dtype is torch.float64 else t for t in tensors], peer)


class Eager(MemcpyBackend):
    """A send says that it is over before the message was copied."""

    def send(self, tensors, peer):
        super().send(tensors, peer)
        return Later()


class Nameless(MemcpyBackend):
    """Whoever waits for a dead device hears of something else."""

    def receive(self, buffers, peer):
        handle = super().receive(buffers, peer)
        return Translating(handle)


class Translating:
    """A handle whose errors name nobody."""

    def __init__(self, handle):
        self.handle = handle

    def wait(self):
        try:
            self.handle.wait()
        except Exception as error:
            raise OSError("something went wrong") from error


class Spilling(MemcpyBackend):
    """A receive writes beyond its buffer."""

    def receive(self, buffers, peer):
        handle = super().receive(buffers, peer)
        for buffer in buffers:
            room = buffer.untyped_storage().nbytes() // buffer.itemsize - buffer.storage_offset() - buffer.numel()
            if room > 0:
                buffer.as_strided((buffer.numel() + 1,), (1,))[-1] = 0
        return handle


class Disordered(MemcpyBackend):
    """Every device adds up in an order of its own."""

    def all_reduce(self, tensor):
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
    """A sum says that it is over before it is."""

    def all_reduce(self, tensor):
        super().all_reduce(tensor)
        return Later()


def _connect(cls, devices):
    exchange = Exchange(devices)
    return [cls(exchange, device) for device in range(devices)]


def swapping(devices):
    return _connect(Swapping, devices)


def blocking(devices):
    return _connect(Blocking, devices)


def rounding(devices):
    return _connect(Rounding, devices)


def eager(devices):
    return _connect(Eager, devices)


def nameless(devices):
    return _connect(Nameless, devices)


def spilling(devices):
    return _connect(Spilling, devices)


def disordered(devices):
    return _connect(Disordered, devices)


def forgetful(devices):
    return _connect(Forgetful, devices)


def unconnected(devices):
    raise OSError("no wire")


def gone():
    """A transport that is not here."""
    return "there is no such wire on this machine"


def kind(name: str) -> BackendKind:
    """The kind of one of the functions above."""
    return BackendKind(name, "broken on purpose", threads=globals()[name])
