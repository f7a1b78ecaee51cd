"""The collectives of tensor ranks, over a process group of torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import WorkerError, message_of
from ...core.tensor_collectives import MAX, SUM
from ..flat_bytes import flat_bytes
from ..watch.activity import HERE

_OPERATIONS = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX}


class GroupCollectives:
    """Runs collectives over a process group.

    Args:
        ranks: of the job, in the group's order.
        group: the process group.

    Attributes:
        rank: the number of this rank in the group.
    """

    def __init__(self, ranks: Sequence[int], group: Any) -> None:
        self._group, self._ranks = group, ranks
        self._others = tuple(rank for rank in ranks if rank != dist.get_rank())
        self.rank = ranks.index(dist.get_rank())

    def all_reduce(self, part: Tensor, operation: str) -> None:
        """See `Collectives`."""
        self._wait(lambda: dist.all_reduce(part, _OPERATIONS[operation], group=self._group))

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        """See `Collectives`."""
        self._wait(lambda: dist.all_gather_into_tensor(whole, part, group=self._group))

    def reduce_scatter(self, whole: Tensor, part: Tensor) -> None:
        """See `Collectives`."""
        self._wait(lambda: dist.reduce_scatter_tensor(part, whole, group=self._group))

    def gather_parts(self, part: Tensor) -> list[Tensor]:
        """The ranks' tensors of one shape and dtype, on the CPU, in order."""
        own = part.detach().cpu()
        data = flat_bytes(own)  # gloo does not know all dtypes
        of_all = [torch.empty_like(data) for _ in self._ranks]
        self._wait(lambda: dist.all_gather(of_all, data, group=self._group))
        return [each.view(own.dtype).reshape(own.shape) for each in of_all]

    def _wait(self, work: Callable[[], Any]) -> None:
        with HERE.waiting(self._others, "a collective of tensor ranks"):
            try:
                work()
            except RuntimeError as error:
                raise WorkerError.stopped_answering(self._others, message_of(error)) from error
