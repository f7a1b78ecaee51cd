"""Tensors that have a shape and, for a while, no memory.

What the user's model has on the meta device stands in a stage as such a tensor until its values are there. A plan that
is only rehearsed takes memory for the time of its rehearsal, with numbers that stand in for values, and gives it back:
plans that are compared never hold their parameters and gradients at the same time. Because it is the storage that
comes and goes, whatever is bound to the tensor stays bound.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def vacant(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape, strides and dtype on a device, without memory."""
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    vacate([tensor])
    return tensor


def vacate(tensors: Iterable[Tensor]) -> None:
    """Give the memory of tensors back; nobody may read or write them until they are occupied."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def occupy(tensors: Iterable[Tensor]) -> None:
    """Take memory for vacant tensors; what it holds is not defined."""
    for tensor in tensors:
        # What a tensor still has would be copied.
        tensor.untyped_storage().resize_(0)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        tensor.untyped_storage().resize_((last + 1) * tensor.dtype.itemsize if tensor.numel() else 0)
