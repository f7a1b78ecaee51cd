"""Layouts of DTensor parameters, and the parts that one tensor rank holds."""

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ...core.errors import RequestError


def check_layout(name: str, value: Any, tensor: int) -> None:
    """Refuse a DTensor that plans do not support.

    Args:
        name: of the parameter.
        value: the DTensor.
        tensor: number of tensor ranks that the user asks for.

    Raises:
        RequestError: it is on another number of ranks or several dimensions, or its parts are uneven or partial.
    """
    mesh = value.device_mesh
    if mesh.ndim != 1 or mesh.size() != tensor:
        raise RequestError(
            f"'{name}' is a DTensor on {mesh}: --tp {tensor} needs a mesh of one dimension with {tensor} ranks"
        )
    (placement,) = value.placements
    whole = placement.is_replicate() or (placement.is_shard() and value.shape[placement.dim] % tensor == 0)
    if not whole:
        raise RequestError(
            f"'{name}' has shape {tuple(value.shape)} and layout {placement!r} over {tensor} ranks: parts must be "
            "equal; use Replicate, or Shard of a dimension that the ranks divide"
        )


def parts_of(model: nn.Module) -> nn.Module:
    """Modules without code that hold one rank's parts of parameters and buffers; tied ones stay one parameter.

    What is no DTensor is the user's own object.
    """
    root = nn.Module()
    known: dict[int, nn.Parameter] = {}

    def place(name: str) -> tuple[nn.Module, str]:
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            inner = module._modules[part]
            assert inner is not None
            module = inner
        return module, last

    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in known:
            part = _part(parameter)
            known[id(parameter)] = (
                nn.Parameter(part, requires_grad=parameter.requires_grad)
                if hasattr(parameter, "to_local")
                else parameter
            )
        module, last = place(name)
        module.register_parameter(last, known[id(parameter)])
    for name, buffer in model.named_buffers(remove_duplicate=False):
        module, last = place(name)
        module.register_buffer(last, _part(buffer) if hasattr(buffer, "to_local") else buffer)
    return root


def _part(parameter: Any) -> Tensor:
    """The part of a parameter that this rank holds."""
    local = parameter.detach()
    return local.to_local() if hasattr(local, "to_local") else local  # type: ignore[no-any-return]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; tied ones under each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


@frozen
class DTensorLayout:
    """The layout of a DTensor.

    Args:
        mesh, placements, shape, stride: of the whole.
        part_shape, part_stride: of the part of this rank.
    """

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]
    part_shape: torch.Size
    part_stride: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> "DTensorLayout":
        """That of a DTensor."""
        part = _part(value)
        return cls(value.device_mesh, value.placements, value.shape, value.stride(), part.shape, part.stride())

    def part(self, dtype: torch.dtype) -> Tensor:
        """A part without values."""
        return torch.empty_strided(self.part_shape, self.part_stride, dtype=dtype, device="cpu")

    def whole(self, part: Tensor) -> Tensor:
        """The DTensor of a part."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
