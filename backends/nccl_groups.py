"""The communicators of the nccl backend, and the limits on them.

A communicator takes thread blocks on the GPU while an operation of it waits for its counterpart: by default 16 to 32 on
NVSwitch, of the 132 multiprocessors of an H100. A message between two ranks needs few of them for the rate of the link,
and compute needs the others, so the number is limited (``ncclConfig_t.maxCTAs``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from ..core.errors import RequestError
from .data_collectives import group_store

PAIR_CTAS, SUM_CTAS = 4, 16
"""The most thread blocks of a communicator, of 1 to 64 (NCCL 2.27): for messages of two ranks, and for sums. Not
measured yet: part ``nccl`` of ``benchmarks/gpu`` creates both with one GPU."""

MOST_COMMUNICATORS = 32
"""Per process: the number of PyTorch's streams of one priority (`c10/cuda/CUDAStream.h`, ``kStreamsPerPool``). Streams
of this package have priority -1, those that NCCL's groups create the highest one, so the two do not share streams."""


class Communicator:
    """Operations of some ranks, one after another. They run on the GPU, and the host waits for none of them.

    It is a process group of its own, created by its ranks without the others. Ranks of operations are indices in it.

    Args:
        ranks: in the job; all of them create it, and wait for each other on first use.
        place: this rank's index among them.
        thread_blocks: the most that one of its operations takes.
    """

    def __init__(self, ranks: Sequence[int], place: int, thread_blocks: int) -> None:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = thread_blocks
        options.global_ranks_in_group = list(ranks)
        self._place = place
        self._count = len(ranks)
        self._group: Any = dist.ProcessGroupNCCL(group_store("nccl", ranks, place), place, len(ranks), options)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a contiguous tensor; the current stream waits for the transfer."""
        self._group.send([tensor], rank, 0).wait()  # makes the current stream wait for NCCL's

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receive into a contiguous tensor; the current stream waits for the transfer."""
        self._group.recv([tensor], rank, 0).wait()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over all ranks, in place, on the current stream."""
        options = dist.AllreduceOptions()
        options.asyncOp = False  # on the current stream, and not on one of the group's
        _ordered(self._group.allreduce([tensor], options))

    def reduce_scatter(self, tensor: Tensor) -> None:
        """Sum each of a contiguous tensor's equal parts on the rank of its number, in place, on the current stream."""
        options: Any = dist.ReduceScatterOptions()
        options.asyncOp = False
        if tensor.numel():
            _ordered(self._group._reduce_scatter_base(self._part(tensor), tensor, options))

    def all_gather(self, tensor: Tensor) -> None:
        """Send each rank's part of a contiguous tensor to all others, in place, on the current stream."""
        options: Any = AllgatherOptions()
        options.asyncOp = False
        if tensor.numel():
            _ordered(self._group._allgather_base(tensor, self._part(tensor), options))

    def _part(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self._count)[self._place]

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Send a contiguous tensor from a rank to all others, on the current stream."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = rank, 0, False
        _ordered(self._group.broadcast([tensor], options))

    def close(self) -> None:
        """Release it."""
        self._group.shutdown()


def _ordered(work: Any) -> None:
    """Let the current stream wait for an operation, unless it ran there."""
    if work is not None:
        work.wait()


pair_communicator, sum_communicator = (partial(Communicator, thread_blocks=most) for most in (PAIR_CTAS, SUM_CTAS))
"""A communicator for messages from one rank to another, and for sums over some ranks."""


def check_count(wanted: int, open_now: int) -> None:
    """Refuse more communicators than there are streams.

    Raises:
        RequestError: together they are too many.
    """
    if open_now + wanted > MOST_COMMUNICATORS:
        raise RequestError(
            f"this rank needs {wanted} more NCCL communicators, {open_now} are open and PyTorch has streams for "
            f"{MOST_COMMUNICATORS}: two on one stream may deadlock; use a plan in which a stage sends to fewer "
            "devices, close pipelines that are done, or use backend='gloo'"
        )
