"""The messages that the rules send: tensors of random bytes, generated equally on both ends, compared bit for bit."""

from zlib import crc32

import torch
from torch import Tensor

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
