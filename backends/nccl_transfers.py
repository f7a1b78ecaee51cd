"""Messages of the nccl backend at one end of an ordered pair: receives are posted, and issued when they are awaited."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from .message_slot import MessageSlot
from .nccl_groups import Communicator
from .streams import Streams


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
