"""Numbers in place of values that are not there."""

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

_NOISE = 1 << 20
"""Elements of the random numbers that a stand-in repeats: copying is an order of magnitude faster than drawing."""


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


def stand_in_for(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A stand-in of a tensor's shape and dtype, laid out like it where its elements fill its memory.

    Args:
        tensor: what it stands for; its values are not read.
        device: where it is made; by default where the tensor is, and on the CPU for one on meta.
    """
    if device is None:
        device = torch.device("cpu") if tensor.is_meta else tensor.device
    if not is_non_overlapping_and_dense_or_false(tensor):
        return stand_in(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    return stand_in(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device))
