"""A custom backend that sends tensors between threads through futures; checked, then used for training.

    python examples/own_backend.py

An entry point ``futures = "my_package:KIND"`` in a package's group ``panpipe.backends`` registers it by name.
"""

import threading
from collections import defaultdict
from concurrent.futures import Future

import panpipe
import torch
from panpipe.backends import conformance
from panpipe.backends.contract import Backend
from panpipe.backends.kind import BackendKind


class Mailboxes:
    """The messages of all devices: number n from one device to another is the future (sender, receiver, n)."""

    def __init__(self):
        self.lock, self.futures, self.failure = threading.Lock(), defaultdict(Future), None

    def future(self, *key):
        with self.lock:
            if self.failure is not None:
                raise self.failure
            return self.futures[key]

    def fail(self, failure):
        with self.lock:
            self.failure = self.failure or failure
            for future in self.futures.values():
                if not future.done():
                    future.set_exception(failure)


class Sent:
    """The handle of a send: the message is already copied, so `wait` only raises failures."""

    def __init__(self, mailboxes):
        self.mailboxes = mailboxes

    def wait(self):
        if self.mailboxes.failure is not None:
            raise self.mailboxes.failure


class Receiving:
    """The handle of a receive: the future of a message, and the buffers for it."""

    def __init__(self, future, buffers):
        self.future, self.buffers = future, buffers

    def wait(self):
        for buffer, tensor in zip(self.buffers, self.future.result(), strict=True):
            buffer.copy_(tensor)


class FutureBackend(Backend):
    """One device's end. Messages have numbers, so that handles may be waited for in any order."""

    name = "futures"

    def __init__(self, device, devices, mailboxes):
        self.device, self.devices, self.mailboxes = device, devices, mailboxes
        self.sent, self.received = [0] * devices, [0] * devices

    def send(self, tensors, peer):
        self.mailboxes.future(self.device, peer, self.sent[peer]).set_result([tensor.clone() for tensor in tensors])
        self.sent[peer] += 1
        return Sent(self.mailboxes)

    def receive(self, buffers, peer):
        future = self.mailboxes.future(peer, self.device, self.received[peer])
        self.received[peer] += 1
        return Receiving(future, buffers)

    def close(self, failure=None):
        if failure is not None:
            self.mailboxes.fail(panpipe.WorkerError(f"device {self.device} stopped: {failure}"))


def connect(devices):
    mailboxes = Mailboxes()
    return [FutureBackend(device, devices, mailboxes) for device in range(devices)]


KIND = BackendKind("futures", "futures between the threads of one process", threads=connect)


if __name__ == "__main__":
    conformance.check(KIND)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)])
    batch, sgd = torch.randn(32, 16), torch.optim.SGD
    pipe = panpipe.pipeline(model, lambda m, x: (m(x) - x).square().mean(), batch, optimizer=sgd, backend=KIND)
    print("loss", *(f"{pipe.step(batch).item():.4f}" for _ in range(5)))
