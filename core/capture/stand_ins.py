"""Numbers in place of values that are not there."""

import torch
from torch import Tensor

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


def stand_in_for(tensor: Tensor) -> Tensor:
    """A stand-in of a tensor's shape and dtype, on the CPU where that one is on meta."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    return stand_in(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
