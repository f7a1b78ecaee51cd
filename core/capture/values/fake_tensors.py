"""Fake tensors for a model's parameters and buffers, and for a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
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
