"""The user's model with DTensors, and the plain model of this rank's parts that is trained: they share their memory.

user's model     DTensor "up.weight" ──────▶ local tensor ◀── memory ──▶ "up.weight" of the parts
                 plain "norm.weight"  ═══════════════════════════════▶ the same object in the parts
"""

from typing import Any

import torch
from torch import nn

from ...core.errors import RequestError
from ..weights import places, tensor_at
from ..weights.remote_tensors import RemoteTensor, make_remote
from .layouts import named_tensors

_ANEW = "build the pipeline again"


class LinkedModel:
    """Keeps a model and its parts equal.

    Args:
        model: the user's.
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
        from torch.distributed.tensor import DTensor

        parts = named_tensors(self._parts)
        for name, tensor in self._known.items():
            part: Any = parts[name]
            if not isinstance(tensor, DTensor):
                continue
            whole: Any = tensor
            whole.grad = None if part.grad is None else DTensor.from_local(
                part.grad, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape,
                stride=whole.stride(),
            )  # fmt: skip
            if part.grad is not None:
                self._published.add(name)
