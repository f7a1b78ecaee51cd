"""Messages between two stages, as one device sees them, and the transport that moves them.

There is one `Message` for each message of a step, and it is reused in every step. It holds the tensors from the action
that writes them to the action that reads them. `finished_sends` finds the sends that must have ended when a receive has
arrived, so that their tensors can be freed.
"""

from collections.abc import Sequence
from typing import Protocol

from attrs import define
from torch import Tensor

from ...backends.contract import Handle
from ...core.actions import COMPUTE_KINDS, RECV_KINDS, Action, Kind
from ...core.plan.plan import Plan

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


def finished_sends(
    plan: Plan, lowered: Sequence[Sequence[Action]], device: int
) -> dict[Action, tuple[MessageKey, ...]]:
    """For receives of one device, the messages it sent whose transfers have ended once the receive has arrived.

    A send has ended when the peer has run the action that reads the message. The next message from that peer proves it.
    So no handle is polled: gloo's handles can only be waited for.

    Args:
        device: the device that sends.
    """
    finished: dict[Action, tuple[MessageKey, ...]] = {}
    placement = plan.placement
    for peer, actions in enumerate(lowered):
        if peer == device:
            continue
        read: list[MessageKey] = []
        arrived: dict[tuple[int, int | None, bool], list[MessageKey]] = {}
        for action in actions:
            stage, kind, microbatch, other = action.stage, action.kind, action.microbatch, action.peer
            if other is not None and microbatch is not None and placement[other] == device:
                if kind in RECV_KINDS:
                    reader = stage, microbatch, kind is Kind.RECV_F
                    arrived.setdefault(reader, []).append((other, stage, microbatch))
                elif read:
                    finished[action.counterpart] = tuple(read)
                    read = []
            elif kind in COMPUTE_KINDS and kind is not Kind.W:
                read += arrived.pop((stage, microbatch, kind is Kind.F), [])
    return finished
