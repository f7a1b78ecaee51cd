"""What a rule runs on: one device, its end of the transport, and what is tried there."""

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
        end: its end of the transport.
        dtypes: what the backend moves of those that are tried.
        where: its tensors are there.
        alone: whether this device is a process of its own.
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
        """A send under way, with what must live until it is over."""
        here = [tensor.to(self.where) for tensor in tensors]
        return self.end.send(here, peer), here

    def receive(self, like: Sequence[Tensor], peer: int) -> tuple[Handle, list[Tensor]]:
        """A receive under way, with its buffers: as large as ``like``, and filled with something else."""
        buffers = [torch.empty(one.shape, dtype=one.dtype, device=self.where) for one in like]
        for buffer in buffers:
            buffer.fill_(1)
        return self.end.receive(buffers, peer), buffers

    def exchange(self, messages: Callable[[int, int], list[list[Tensor]]], what: Callable[[int, int], str]) -> None:
        """Send all messages of every pair and direction at once, receive them, and expect them unchanged.

        Args:
            messages: (sender, receiver) → what the one sends the other, in order.
            what: (sender, number of the message) → the subject of what is said of a changed one.
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
