"""Parameters of the user's model that another process holds: here only their shape exists, and other uses are refused.

Such a tensor is on the meta device, where PyTorch computes shapes without values: an average ``a.mul_(d).add_(p)`` or a
norm over ``model.parameters()`` would silently have no effect, or omit most of the model. So it gets another class,
whose operations raise an error with the parameter's name and its rank. Metadata such as shape and dtype work as usual.

The model's previous tensor gets this class, too: a reference to it, in an optimizer or in a list, has values that
training no longer changes.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...core.errors import RequestError
from ...core.tensor_metadata import METADATA_FUNCTIONS, first_of, name_of
from .places import places, tensor_at

_READ_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
_SET_GRADIENT = Tensor.grad.__set__  # type: ignore[union-attr]
_CLEARING = (nn.Module.zero_grad.__code__, inspect.unwrap(torch.optim.Optimizer.zero_grad).__code__)
"""torch's functions that clear gradients: a gradient of another process is no part of what they change here."""


class RemoteTensor(Tensor):
    """A parameter or buffer that another process holds; see `make_remote`.

    Attributes:
        holder: the process that holds it, such as ``rank 1``.
    """

    held_as: str
    holder: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in METADATA_FUNCTIONS or (func == _SET_GRADIENT and args[1] is None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        if func == _READ_GRADIENT and sys._getframe(1).f_code in _CLEARING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        held = first_of(RemoteTensor, (args, named))
        assert held is not None
        if func in (Tensor.detach, torch.detach):  # state_dict() calls it, and needs only the tensor's name
            with torch._C.DisableTorchFunctionSubclass():
                found: Tensor = func(*args, **named)
            return _marked(found, held.held_as, held.holder)
        held._refuse(name_of(func))

    def _refuse(self, what: str) -> NoReturn:
        raise RequestError(
            f"'{self.held_as}' is held by {self.holder}, and this rank has only its shape: '{what}' would be lost or "
            "wrong; panpipe.weights.on_parameters(pipe, function) runs where parameters are, panpipe.weights.ema(pipe) "
            "averages them, "
            "Update(clip_norm=) clips gradients, every update clears them, pipe.save() and pipe.checkpoint() write it"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, dtype = tuple(self.shape), str(self.dtype).removeprefix("torch.")
        return f"<'{self.held_as}' of shape {shape}, {dtype}, held by {self.holder}>"

    __str__ = __repr__

    def __format__(self, form: str) -> str:
        return format(repr(self), form)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse("copy.deepcopy")

    def __copy__(self) -> NoReturn:
        self._refuse("copy.copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickle")


class _RemoteParameter(RemoteTensor, nn.Parameter):
    """A parameter that another process holds."""


def make_remote(tensor: Tensor, name: str, holder: str) -> None:
    """Make a tensor refuse every operation that needs its values."""
    _marked(tensor, name, holder)


def _marked(tensor: Tensor, name: str, holder: str) -> Tensor:
    kind = _RemoteParameter if isinstance(tensor, nn.Parameter) else RemoteTensor
    tensor.__class__ = kind  # torch's lazy parameters change their class in the same way
    tensor.held_as, tensor.holder = name, holder  # type: ignore[attr-defined]
    return tensor


@contextmanager
def as_meta_tensors(model: nn.Module) -> Iterator[None]:
    """A context in which a model's remote tensors are plain tensors on meta: for captures, which read shapes.

    Those that only lack memory now (``update/shared_parameters``) are replaced meanwhile.
    """
    every: list[Tensor] = [*model.parameters(), *model.buffers()]
    held = [tensor for tensor in every if isinstance(tensor, RemoteTensor)]
    classes = [type(tensor) for tensor in held]
    for tensor in held:
        tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor  # type: ignore[assignment]
    empty: dict[int, Tensor] = {id(tensor): tensor for tensor in held if not tensor.is_meta}
    found = [place for places_of in (places(model).values() if empty else ()) for place in places_of]
    replaced = [(place, tensor_at(place)) for place in found if id(tensor_at(place)) in empty]
    stand_ins = {key: nn.Parameter(torch.empty_like(t, device="meta"), t.requires_grad) for key, t in empty.items()}
    for place, original in replaced:
        place.module._parameters[place.leaf] = stand_ins[id(original)]
    try:
        yield
    finally:
        for place, original in replaced:
            place.module._parameters[place.leaf] = original  # type: ignore[assignment]
        for tensor, kind in zip(held, classes, strict=True):
            tensor.__class__ = kind
