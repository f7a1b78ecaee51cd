"""Messages of the nccl backend at one end of an ordered pair: receives are posted, and issued when they are awaited.

Messages pass through a slot, memory that is allocated once for each ordered pair, and kept::

    sender                                       receiver
    tensors ──copy──▶ slot ════ NCCL ════▶ slot ──copy──▶ buffers

ProcessGroupNCCL calls ``record_stream`` on every tensor that it sends or receives (``pointToPoint`` in
``ProcessGroupNCCL.cpp``). The allocator then reuses the tensor's memory when the host observes that the transfer has
ended, so the peak of a step would depend on how far the host runs ahead (part ``nccl`` of ``benchmarks/gpu``
measures it). A slot is never freed, and the caller's tensors never reach NCCL. The copies run on the stream of the
pair, so one slot for each pair is enough.

A message that is larger than a slot passes through it in batches. Both ends compute the same batches from the sizes of
the tensors alone.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from attrs import define, field
from torch import Tensor

from .nccl_groups import Communicator
from .streams import Streams

MOST_BYTES = 1 << 26
"""Bytes of the largest slot. At 64 MiB latency has no effect: they take 0.2 ms at 400 GB/s, 3 ms at 25 GB/s."""
_ALIGNED_BYTES = 16
"""Tensors begin at multiples of this, so that copies use the widest loads."""


class Piece(NamedTuple):
    """A part of a tensor in a slot. Bytes.

    Args:
        tensor: number of the tensor in the message.
        at: its position in the slot.
    """

    tensor: int
    start: int
    stop: int
    at: int

    @property
    def end(self) -> int:
        """The end of its position in the slot."""
        return self.at + self.stop - self.start


def batches(sizes: Sequence[int], most: int = MOST_BYTES) -> Iterator[list[Piece]]:
    """The pieces of a message, by batches that pass through a slot one after another.

    Args:
        sizes: bytes of the message's tensors.
        most: bytes of the largest slot.
    """
    batch: list[Piece] = []
    used = 0
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            if used >= most:
                yield batch
                batch, used = [], 0
            stop = min(size, start + most - used)
            batch.append(Piece(number, start, stop, used))
            used += -(-(stop - start) // _ALIGNED_BYTES) * _ALIGNED_BYTES
            start = stop
    if batch:
        yield batch


@define(eq=False)
class MessageSlot:
    """The slot of an ordered pair at one of its ends."""

    device: torch.device
    _memory: Tensor | None = None

    def of(self, size: int) -> Tensor:
        """The first ``size`` bytes. The slot grows to the largest size that was requested."""
        if self._memory is None or self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._memory[:size]


def load(slot: Tensor, tensors: Sequence[Tensor], batch: Sequence[Piece]) -> None:
    """Copy a batch into a slot; ``tensors`` are the message's as flat bytes."""
    for piece in batch:
        slot[piece.at : piece.end].copy_(tensors[piece.tensor][piece.start : piece.stop], non_blocking=True)


def unload(slot: Tensor, tensors: Sequence[Tensor], batch: Sequence[Piece]) -> None:
    """Copy a batch out of a slot; ``tensors`` are the message's buffers as flat bytes."""
    for piece in batch:
        tensors[piece.tensor][piece.start : piece.stop].copy_(slot[piece.at : piece.end], non_blocking=True)


@define(eq=False)
class Channel:
    """One end of an ordered pair.

    Args:
        communicator: of the two ranks: the sender, then the receiver.
        posted: receives that are not issued yet, in order.
    """

    communicator: Communicator
    rank: int
    stream: Any
    slot: MessageSlot
    posted: "deque[Receive]" = field(factory=deque)


@define(eq=False)
class Transfer:
    """A transfer that was issued.

    Args:
        tensors: its tensors; empty after the wait.
    """

    streams: Streams
    device: torch.device
    span: tuple[Any, Any]
    tensors: Sequence[Tensor]

    def wait(self) -> None:
        if self.tensors:
            self.streams.wait(self.streams.current(self.device), self.span[1])
            self.tensors = ()


@define(eq=False)
class Receive:
    """A receive that was posted; `wait` issues it, after the earlier ones of its pair.

    Args:
        buffers: as contiguous bytes.
    """

    issue: "Callable[[Receive], Transfer]"
    channel: Channel
    ready: Any
    buffers: Sequence[Tensor]
    transfer: Transfer | None = None

    def wait(self) -> None:
        while self.transfer is None:
            first = self.channel.posted.popleft()
            first.transfer, first.buffers = self.issue(first), ()
        self.transfer.wait()
