"""Refuses a region's module that reads tensors other than its arguments and its own parameters and buffers.

A copy of the module runs on one stage. Tensors of other modules, or computed elsewhere in the step, are not there: the
copy would have their values at capture, or none, and no gradient would be sent back.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import RequestError
from ...tensor_metadata import METADATA_READS, first_of
from ..values.user_lines import current_line


class ForeignReads(TorchFunctionMode):
    """A mode that watches a run of a step, and refuses calls of modules that read tensors of others.

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
        """The context of a call of a module that stays Python.

        Args:
            who: the module's name, with the user's line.
            module: the module.
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
        if self._own is not None and func not in METADATA_READS:
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
            raise RequestError(f"{current_line()}{self._who} stays Python and {_FOREIGN.format(name)}")
        if tensor in self._before:
            raise RequestError(
                f"{current_line()}{self._who} stays Python and reads a tensor of shape {tuple(tensor.shape)} here that "
                "the step computed outside of it, and that is not an argument: pass it to its forward as one"
            )


class _Foreign(Tensor):
    """Replaces a parameter or buffer of another module; operators that read its values are refused."""

    qualified_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA_READS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        foreign = first_of(_Foreign, (args, kwargs or {}))
        assert foreign is not None
        raise RequestError(f"{current_line()}a module that stays Python {_FOREIGN.format(foreign.qualified_name)}")


def foreign_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Identity of each parameter and buffer of a model → its replacement in copies of modules without it."""
    found: dict[int, Tensor] = {}
    for tensor, name in zip((*model.parameters(), *model.buffers()), _names(model).values(), strict=True):
        foreign: Any = torch.Tensor._make_subclass(_Foreign, tensor.detach().to("meta"))
        foreign.qualified_name = name
        found[id(tensor)] = foreign
    return found


def _names(model: nn.Module) -> Mapping[int, str]:
    return {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}


_FOREIGN = (
    "reads '{}' here, which is not its own: pass it to its forward as an argument, or make the module that has it a "
    "submodule"
)
"""The rest of a message, with the tensor's name."""
