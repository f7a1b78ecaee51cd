"""The gloo backend: processes, tensors on the CPU, one message after another over the process group's sockets."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from ..core.errors import WorkerError
from .contract import Backend, Handle


class _Works:
    """Handles of a message's tensors. gloo can only be waited for: nothing tells that it is done but `wait`."""

    __slots__ = ("_peer", "_works")

    def __init__(self, works: list[Any], peer: int) -> None:
        self._works = works
        self._peer = peer

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise WorkerError(f"rank {self._peer} stopped answering: {error}") from error
        self._works.clear()


class GlooBackend(Backend):
    """One rank's end of a gloo process group whose ranks are the pipeline's devices.

    Args:
        group: the group; the default one if None.
    """

    name: ClassVar[str] = "gloo"

    def __init__(self, group: Any = None) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self.device = self._group.rank()
        self.devices = self._group.size()

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        try:
            return _Works([self._group.send([tensor], peer, 0) for tensor in tensors], peer)
        except RuntimeError as error:
            raise WorkerError(f"rank {peer} stopped answering: {error}") from error

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        try:
            return _Works([self._group.recv([buffer], peer, 0) for buffer in buffers], peer)
        except RuntimeError as error:
            raise WorkerError(f"rank {peer} stopped answering: {error}") from error

    def broadcast(self, tensor: Tensor, source: int) -> None:
        try:
            dist.broadcast(tensor, group_src=source, group=self._group)
        except RuntimeError as error:
            raise WorkerError(f"rank {source} stopped answering: {error}") from error

    def close(self, failure: BaseException | None = None) -> None:
        """The process group belongs to whoever made it."""
