"""Tensors whose memory is allocated later, and can be freed again.

A parameter that the user's model has on the meta device is such a tensor in its stage until its values are set. Only
the storage is resized, so references to the tensor stay valid.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def unallocated(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape, strides and dtype on a device, without memory."""
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    deallocate([tensor])
    return tensor


def deallocate(tensors: Iterable[Tensor]) -> None:
    """Free the memory of tensors; they may not be read or written until `allocate`."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def allocate(tensors: Iterable[Tensor]) -> None:
    """Allocate memory for tensors; its contents are undefined."""
    for tensor in tensors:
        # First to 0 bytes: otherwise the old contents would be copied.
        tensor.untyped_storage().resize_(0)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        tensor.untyped_storage().resize_((last + 1) * tensor.dtype.itemsize if tensor.numel() else 0)
