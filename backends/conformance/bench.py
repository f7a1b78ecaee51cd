"""The environment of a rule: one device, its end of the transport, and the dtypes to try."""

from collections.abc import Callable, Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from ..contract import Backend, Handle
from .payload import expect


@frozen
class Bench:
    """One device on which the rules run.

    Args:
        dtypes: those of the tried dtypes that the backend can send.
        alone: whether this device has a separate process.
    """

    end: Backend
    dtypes: Sequence[torch.dtype] = field(kw_only=True)
    where: torch.device = field(kw_only=True)
    alone: bool = field(kw_only=True)

    @property
    def others(self) -> list[int]:
        """All devices but this one."""
        return [device for device in range(self.end.devices) if device != self.end.device]

    def send(self, tensors: Sequence[Tensor], peer: int) -> tuple[Handle, Sequence[Tensor]]:
        """A send in flight, with the tensors that must live until it has ended."""
        here = [tensor.to(self.where) for tensor in tensors]
        return self.end.send(here, peer), here

    def receive(self, like: Sequence[Tensor], peer: int) -> tuple[Handle, list[Tensor]]:
        """A receive in flight, with its buffers: of the shapes of ``like``, filled with ones."""
        buffers = [torch.empty(one.shape, dtype=one.dtype, device=self.where) for one in like]
        for buffer in buffers:
            buffer.fill_(1)
        return self.end.receive(buffers, peer), buffers

    def exchange(self, messages: Callable[[int, int], list[list[Tensor]]], what: Callable[[int, int], str]) -> None:
        """Send all messages of every ordered pair at the same time, receive them, and expect them unchanged.

        Args:
            messages: (sender, receiver) → the messages from the one to the other, in order.
            what: (sender, number of the message) → its name in an error about a changed message.
        """
        me = self.end.device
        flying = [self.send(message, peer) for peer in self.others for message in messages(me, peer)]
        for peer in self.others:
            for number, message in enumerate(messages(peer, me)):
                handle, buffers = self.receive(message, peer)
                handle.wait()
                for buffer, sent in zip(buffers, message, strict=True):
                    expect(buffer, sent, what(peer, number))
        for handle, _ in flying:
            handle.wait()
