"""A backend over the sends and receives of the job's own process group."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from panpipe import WorkerError
from panpipe.backends.contract import Backend
from panpipe.backends.kind import BackendKind
from torch import Tensor

TAG = 7


class Transfer:
    """The tensors of a message in flight, and the buffers for those that are received."""

    def __init__(self, peer: int, works: Sequence[Any], tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        self.peer, self.works, self.tensors, self.buffers = peer, works, tensors, buffers

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as failure:
            raise WorkerError(f"rank {self.peer} stopped answering: {failure}") from failure
        for buffer, tensor in zip(self.buffers, self.tensors, strict=False):
            buffer.copy_(tensor)


class GroupBackend(Backend):
    """One rank's end; tensors without elements are not sent."""

    name: ClassVar[str] = "group"

    def __init__(self, group: Any) -> None:
        self.group, self.device, self.devices = group, group.rank(), group.size()

    def _move(self, function: Any, tensors: Sequence[Tensor], peer: int) -> list[Any]:
        try:
            return [function([tensor.view(torch.uint8)], peer, TAG) for tensor in tensors if tensor.numel()]
        except RuntimeError as failure:
            raise WorkerError(f"rank {peer} stopped answering: {failure}") from failure

    def send(self, tensors: Sequence[Tensor], peer: int) -> Transfer:
        values = [tensor.resolve_conj().resolve_neg().contiguous().reshape(-1) for tensor in tensors]
        return Transfer(peer, self._move(self.group.send, values, peer), values, ())

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Transfer:
        values = [torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in buffers]
        works = self._move(self.group.recv, [value.reshape(-1) for value in values], peer)
        return Transfer(peer, works, values, buffers)

    def close(self, failure: BaseException | None = None) -> None:
        """The group is the job's."""


KIND = BackendKind(
    "group",
    "sends and receives of the job's own process group",
    ranks=GroupBackend,
    dtypes=frozenset({torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64}),
)
