"""The environment of a rule: one device, its end of the transport, and the dtypes to try.

Messages are tensors of random bytes, generated equally on both ends, compared bit for bit.
"""

from collections.abc import Callable, Sequence
from zlib import crc32

import torch
from attrs import field, frozen
from torch import Tensor

from ..contract import Backend, Handle
from ..kind import dtype_name

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip
"""The dtypes that the rules send, if the backend can."""


class BrokenRuleError(Exception):
    """A rule of the contract is broken; the message says how."""


def payload(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *key: int) -> Tensor:
    """A tensor of random bytes, NaNs and infinities among them; the same for the same shape, dtype and key."""
    generator = torch.Generator().manual_seed(crc32(repr((shape, dtype, key)).encode()))
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    found = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return found.view(dtype).reshape(shape)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits."""
    return bool(torch.equal(_bits(found), _bits(wanted)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def expect(found: Tensor, wanted: Tensor, what: str) -> None:
    """Raise BrokenRuleError if two tensors differ in a bit.

    Args:
        what: the subject of the error, such as ``the message of device 0``.
    """
    if not same(found, wanted):
        wrong = int((_bits(found) != _bits(wanted)).sum())
        size = f"{list(wanted.shape)} of {dtype_name(wanted.dtype)}"
        raise BrokenRuleError(f"{what}, a tensor {size}, arrived with {wrong} of {wanted.nbytes} bytes changed")


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
