"""A transport whose waits for a dead rank never end, as those of GPU kernels: gloo without its errors."""

import threading
from contextlib import contextmanager

from panpipe.backends.gloo import GlooBackend
from panpipe.backends.kind import BackendKind
from panpipe.core.errors import WorkerError


@contextmanager
def waiting_forever_on_failure():
    try:
        yield
    except WorkerError:
        threading.Event().wait()


class EndlessHandle:
    def __init__(self, handle):
        self._handle = handle

    def wait(self):
        with waiting_forever_on_failure():
            self._handle.wait()


class EndlessBackend(GlooBackend):
    name = "endless-waits"

    def send(self, tensors, peer):
        with waiting_forever_on_failure():
            return EndlessHandle(super().send(tensors, peer))

    def receive(self, buffers, peer):
        with waiting_forever_on_failure():
            return EndlessHandle(super().receive(buffers, peer))

    def all_reduce(self, tensor):
        with waiting_forever_on_failure():
            return EndlessHandle(super().all_reduce(tensor))


KIND = BackendKind("endless-waits", "waits forever for dead ranks", ranks=EndlessBackend, detects_dead_peers=False)
