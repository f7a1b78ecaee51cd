"""Messages between two stages, at one device, and what moves them.

There is a `Mail` for every message of a step, and it stays from step to step: it holds tensors from the action that
leaves them to the one that takes them.
"""

from collections.abc import Sequence
from typing import Protocol

from attrs import define
from torch import Tensor

from ...backends.contract import Handle

Message = tuple[int, int, int]
"""The stage that it leaves, the stage that reads it, the microbatch."""


@define(eq=False, slots=True)
class Mail:
    """A message between two stages, at one device.

    Args:
        tensors: while they are to be sent or read.
        handle: of a transfer that nobody has waited for yet.
    """

    tensors: list[Tensor] | None = None
    handle: Handle | None = None

    def settle(self) -> None:
        """Wait for the transfer, and let go of what was sent."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = self.tensors = None


class Transport(Protocol):
    """What messages between stages need of a backend."""

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        """See :class:`Backend`."""

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        """See :class:`Backend`."""
