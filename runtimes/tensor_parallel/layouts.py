"""Layouts of DTensor parameters, and the plain model of one rank's parts, which shares its memory with the user's.

user's model     DTensor "up.weight" ──────▶ local tensor ◀── memory ──▶ "up.weight" of the parts
                 plain "norm.weight"  ═══════════════════════════════▶ the same object in the parts
"""

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ...core.errors import RequestError
from ..weights import places, tensor_at
from ..weights.remote_tensors import RemoteTensor, make_remote


def check_layout(name: str, value: Any, tensor: int) -> None:
    """Refuse a DTensor that plans do not support.

    Args:
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
    return _parts_of(model, {})


def _parts_of(module: nn.Module, known: dict[int, nn.Parameter]) -> nn.Module:
    made = nn.Module()
    for name, parameter in module._parameters.items():
        part: Any = parameter
        if hasattr(parameter, "to_local"):
            if id(parameter) not in known:
                known[id(parameter)] = nn.Parameter(_part(part), requires_grad=part.requires_grad)
            part = known[id(parameter)]
        made.register_parameter(name, part)
    for name, buffer in module._buffers.items():
        made.register_buffer(name, _part(buffer) if hasattr(buffer, "to_local") else buffer)
    for name, child in module._modules.items():
        made.add_module(name, None if child is None else _parts_of(child, known))
    return made


def _part(value: Any) -> Tensor:
    """The part of a DTensor that this rank holds."""
    return value.detach().to_local()  # type: ignore[no-any-return]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; tied ones under each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


@frozen
class DTensorLayout:
    """The layout of a DTensor."""

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


_ANEW = "build the pipeline again"


class LinkedModel:
    """Keeps a model and its parts equal.

    Args:
        parts: of this rank, with the same names.
    """

    def __init__(self, model: nn.Module, parts: nn.Module) -> None:
        self._model, self._parts = model, parts
        self._known = named_tensors(model)
        self._published: set[str] = set()

    def follow(self) -> None:
        """Apply what the user changed between steps: frozen parameters, cleared gradients.

        Raises:
            RequestError: a parameter or buffer was replaced, or a parameter has a hook.
        """
        now, parts = named_tensors(self._model), named_tensors(self._parts)
        for name, tensor in now.items():
            if tensor is not self._known.get(name):
                raise RequestError(
                    f"'{name}' was replaced: parameters and buffers of models with DTensors stay the same objects; "
                    f"write into it under torch.no_grad(), or {_ANEW}"
                )
            if not isinstance(tensor, nn.Parameter) or tensor is parts[name]:
                continue
            if tensor.requires_grad != parts[name].requires_grad:
                raise RequestError(
                    f"'{name}' was {'un' * tensor.requires_grad}frozen: freeze parameters of models with DTensors "
                    f"before panpipe.pipeline, or {_ANEW}"
                )
            if name in self._published and tensor.grad is None:
                parts[name].grad = None

    def release(self) -> None:
        """Replace what other ranks hold in the user's model, too, so that every use of its values raises an error."""
        parts = named_tensors(self._parts)
        for name, held in places(self._model).items():
            part: Any = parts[name]
            if not isinstance(part, RemoteTensor):
                continue
            tensor = tensor_at(held[0])
            if hasattr(tensor, "to_local"):
                # Its shape stays that of the whole parameter.
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                if isinstance(tensor, nn.Parameter):
                    whole = nn.Parameter(whole, tensor.requires_grad)
                make_remote(whole, name, part.holder)
                part = whole
            for place in held:
                setattr(place.module, place.leaf, part)
        self._known = named_tensors(self._model)

    def publish_gradients(self) -> None:
        """Give the user's parameters the gradients of their parts, as DTensors."""
        parts = named_tensors(self._parts)
        for name, tensor in self._known.items():
            part: Any = parts[name]
            if not hasattr(tensor, "to_local"):
                continue
            tensor.grad = None if part.grad is None else DTensorLayout.of(tensor).whole(part.grad)
            if part.grad is not None:
                self._published.add(name)
