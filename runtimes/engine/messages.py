"""Messages between two stages, as one device sees them, and the transport that moves them.

There is one `Message` for each message of a step, and it is reused in every step. It holds the tensors from the action
that writes them to the action that reads them.
"""

from collections.abc import Sequence
from typing import Protocol

from attrs import define
from torch import Tensor

from ...backends.contract import Handle

MessageKey = tuple[int, int, int]
"""The sending stage, the reading stage, the microbatch."""


@define(eq=False, slots=True)
class Message:
    """A message between two stages, at one device.

    Args:
        tensors: its tensors, from the action that writes them to the one that reads them; None otherwise.
        handle: the transfer in flight; None after it was waited for.
        buffers: the memory that it is received into, if captured graphs read it; otherwise None.
    """

    tensors: list[Tensor] | None = None
    handle: Handle | None = None
    buffers: list[Tensor] | None = None

    def finish_send(self) -> None:
        """Wait for the transfer, and free the sent tensors; does nothing if no transfer is in flight."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = self.tensors = None


class Transport(Protocol):
    """The part of a backend that messages between stages use."""

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        """See :class:`Backend`."""

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        """See :class:`Backend`."""
