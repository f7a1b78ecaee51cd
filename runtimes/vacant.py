"""Tensors that have a shape and, for a while, no memory.

What the user's model has on the meta device stands in a stage as such a tensor until its values are there. A plan that
is only rehearsed takes memory for the time of its rehearsal, with numbers that stand in for values, and gives it back:
plans that are compared never hold their parameters and gradients at the same time. Because it is the storage that
comes and goes, whatever is bound to the tensor stays bound.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_NOISE = 1 << 20
"""Elements of the random numbers that a stand-in repeats: copying is an order of magnitude faster than drawing."""


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


def stand_in(tensor: Tensor) -> Tensor:
    """Fill a tensor with small random numbers, or zeros where it holds none: times do not depend on values.

    The numbers repeat, and no generator that the user seeds is drawn from.

    Returns:
        The tensor.
    """
    with torch.no_grad():
        if not tensor.is_floating_point():
            return tensor.zero_()
        generator = torch.Generator(tensor.device).manual_seed(0)
        if not tensor.is_contiguous() or tensor.numel() <= _NOISE:
            return tensor.normal_(0, 0.02, generator=generator)
        flat = tensor.view(-1)
        flat[:_NOISE].normal_(0, 0.02, generator=generator)
        for first in range(_NOISE, len(flat), _NOISE):
            part = flat[first : first + _NOISE]
            part.copy_(flat[: len(part)])
    return tensor
