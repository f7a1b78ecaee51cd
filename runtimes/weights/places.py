"""The places of a model's parameters and buffers: the attributes of modules that hold them.

A parameter that the user's model has on the meta device has no memory in its stage until its values are set. Only the
storage is resized, so references to the tensor stay valid.
"""

from collections.abc import Iterable

import torch
from attrs import frozen
from torch import Tensor, nn


@frozen
class Place:
    """An attribute of a module that holds a tensor."""

    path: str
    module: nn.Module
    leaf: str

    @property
    def name(self) -> str:
        """The tensor's qualified name."""
        return f"{self.path}.{self.leaf}" if self.path else self.leaf

    @property
    def described(self) -> str:
        """The module, for messages."""
        return f"module '{self.path}' ({type(self.module).__name__})" if self.path else type(self.module).__name__

    @property
    def kind(self) -> str:
        """Whether it is a parameter or a buffer."""
        return "parameter" if self.leaf in self.module._parameters else "buffer"

    @property
    def persistent(self) -> bool:
        """Whether a checkpoint holds it."""
        return self.leaf not in self.module._non_persistent_buffers_set


def places(model: nn.Module) -> dict[str, tuple[Place, ...]]:
    """Every parameter and buffer, by its first name, with all attributes that hold it."""
    found: dict[int, list[Place]] = {}
    for kind in ("_parameters", "_buffers"):
        for path, module in model.named_modules(remove_duplicate=False):
            for leaf, tensor in getattr(module, kind).items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append(Place(path, module, leaf))
    return {held[0].name: tuple(held) for held in found.values()}


def tensor_at(place: Place) -> Tensor:
    """The tensor of a place."""
    module, leaf = place.module, place.leaf
    tensor = module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]
    assert tensor is not None
    return tensor


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
