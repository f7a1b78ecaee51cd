"""Tensors in place of others: fake ones for a model and a batch, and random numbers for missing values, as on meta."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_of(
    tensor: Tensor, mode: FakeTensorMode, device: torch.device, shape: Sequence[int] | None = None
) -> FakeTensor:
    """A fake tensor like a tensor; contiguous if another shape is given."""
    with mode:
        if shape is not None and tuple(shape) != tuple(tensor.shape):
            return torch.empty(tuple(shape), dtype=tensor.dtype, device=device)  # type: ignore[return-value]
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)  # type: ignore[return-value]


def fake_state(
    whole: nn.Module, mode: FakeTensorMode, device: torch.device, gradients: bool
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The canonical name of every name of a parameter or buffer, and the fake tensor by name.

    The canonical name of a tied weight is the first of its names, in the order of ``named_parameters``. A module that
    has several names has its tensors once: torch would replace them twice, and then put back the fake ones.
    """
    once = {
        f"{path}.{key}" if path else key
        for path, module in whole.named_modules()
        for key in (*module._parameters, *module._buffers)
    }
    canonical: dict[str, str] = {}
    fakes: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for source in (whole.named_parameters, whole.named_buffers):
        for name, tensor in source(remove_duplicate=False):
            origin = first.setdefault(id(tensor), name)
            canonical[name] = origin.removeprefix("model.")
            if name not in once:
                continue
            if origin == name:
                fake: Tensor = fake_of(tensor.detach(), mode, device)
                fakes[name] = (
                    nn.Parameter(fake, requires_grad=gradients and tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else fake
                )
            else:
                fakes[name] = fakes[origin]
    return canonical, fakes


def have_equal_shapes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and dtype."""
    return (one.shape, one.dtype) == (other.shape, other.dtype)


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
