"""Random numbers in place of missing values, such as those of tensors on the meta device."""

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

_NOISE = 1 << 20
"""Elements of the random numbers that a stand-in repeats: copying is an order of magnitude faster than drawing."""


def fill_with_stand_ins(tensor: Tensor) -> Tensor:
    """Fill a tensor with small random numbers, or with zeros if it does not have a floating-point type.

    The numbers repeat, and do not come from a generator that the user seeds.

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


def stand_in_for(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor of random numbers with a tensor's shape and dtype, and its strides if it is dense.

    Args:
        tensor: the tensor to replace; its values are not read.
        device: by default the tensor's, and the CPU for one on meta.
    """
    if device is None:
        device = torch.device("cpu") if tensor.is_meta else tensor.device
    if not is_non_overlapping_and_dense_or_false(tensor):
        return fill_with_stand_ins(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    return fill_with_stand_ins(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device))
