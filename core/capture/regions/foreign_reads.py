"""What a module that stays Python reads besides its arguments and its own parameters and buffers.

It runs on one stage, as a copy. What belongs to another module, or was computed elsewhere in the step, is not there:
the copy would have its values of the time of capture, or none, and no gradient would go back.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import RequestError
from ..values.user_lines import calling_line

_METADATA = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.__len__}
_OF_VALUES = {"T", "mT", "H", "mH", "real", "imag", "data", "grad"}
"""Properties of tensors that are tensors; the others are metadata."""


class ForeignReads(TorchFunctionMode):
    """Watches a run of a step, and refuses calls of modules that read what is not theirs.

    Args:
        model: the user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = _names(model)
        self._made: Any = WeakIdKeyDictionary()
        self._before: Any = WeakIdKeyDictionary()
        self._own: set[int] | None = None
        self._who = ""

    @contextmanager
    def within(self, who: str, module: nn.Module, given: Sequence[Tensor]) -> Iterator[None]:
        """Within, a module that stays Python is called.

        Args:
            who: it, with the user's line.
            module: it.
            given: the tensors among its arguments.
        """
        self._who, self._before, self._made = who, self._made, WeakIdKeyDictionary()
        self._own = set(map(id, (*given, *module.parameters(), *module.buffers())))
        try:
            yield
        finally:
            self._own = None
            for tensor in self._before:
                self._made[tensor] = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._own is not None and _reads(func):
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and id(tensor) not in self._own and tensor not in self._made:
                    self._refuse(tensor)
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) not in self._names:
                self._made[tensor] = True
        return result

    def _refuse(self, tensor: Tensor) -> None:
        name = self._names.get(id(tensor))
        if name is not None:
            raise RequestError(f"{_line()}{self._who} stays Python and {_ANOTHERS.format(name)}")
        if tensor in self._before:
            raise RequestError(
                f"{_line()}{self._who} stays Python and reads a tensor of shape {tuple(tensor.shape)} here that the "
                "step computed outside of it, and that is none of its arguments: pass it to its forward as one"
            )


class _Foreign(Tensor):
    """In the place of a parameter or buffer of another module: whoever computes with it is refused."""

    qualified_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _reads(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next(leaf.qualified_name for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Foreign))
        raise RequestError(f"{_line()}a module that stays Python {_ANOTHERS.format(name)}")


def foreign_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Identity of each parameter and buffer of a model → what copies of modules have instead that it is not part of."""
    found: dict[int, Tensor] = {}
    for tensor, name in zip((*model.parameters(), *model.buffers()), _names(model).values(), strict=True):
        foreign: Any = torch.Tensor._make_subclass(_Foreign, tensor.detach().to("meta"))
        foreign.qualified_name = name
        found[id(tensor)] = foreign
    return found


def _names(model: nn.Module) -> Mapping[int, str]:
    return {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}


_ANOTHERS = (
    "reads '{}' here, which is not its own: pass it to its forward as an argument, or make the module that has it a "
    "submodule"
)


def _line() -> str:
    line = calling_line(sys._getframe(1))
    return f"{line}: " if line else ""


def _reads(func: Any) -> bool:
    """Whether a function computes with what it is given, and reads no metadata alone."""
    if getattr(func, "__name__", "") == "__get__":
        return func.__self__.__name__ in _OF_VALUES
    return func not in _METADATA
