"""Shows that a step computes the same after it has set a flag, without a second export.

While the step is exported, its calls of torch are recorded. Its Python then runs again with the flag, on the same
tensors: each call, except reads of metadata, must be the recorded one, and returns the recorded result, so nothing is
computed or traced.
"""

from collections.abc import Callable
from types import BuiltinFunctionType, MethodWrapperType
from typing import Any

import torch
from attrs import define
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...tensor_metadata import METADATA_READS


class Differs(Exception):
    """The step does not make the same calls again, or it is not known whether it does."""


@define(eq=False)
class _Call:
    """A call of torch.

    Args:
        leaves, structure: of the function, its arguments and the modes in which it is called.
        result: what it returned.
    """

    leaves: list[Any]
    structure: Any
    result: Any = None

    def equals(self, other: "_Call") -> bool:
        """Whether both are the same function of the same tensors, sizes and other values."""
        return self.structure == other.structure and all(map(_are_same, self.leaves, other.leaves))


class RecordedCalls(TorchFunctionMode):
    """A mode in which calls of torch are recorded, and later compared."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._place: int | None = None  # of the next call to compare
        self._differ = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA_READS or func is Tensor.untyped_storage:
            return func(*args, **(kwargs or {}))
        autocasts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        modes = (torch.get_default_dtype(), autocasts)
        call = _Call(*pytree.tree_flatten((func, args, kwargs or {}, modes)))
        if self._place is None:
            self._calls.append(call)
            call.result = func(*args, **(kwargs or {}))
            return call.result
        self._differ = (
            self._differ or self._place == len(self._calls) or not self._calls[self._place].equals(call)
        )  # the step may suppress the error
        if self._differ:
            raise Differs
        self._place += 1
        return self._calls[self._place - 1].result

    def compare(self, run: Callable[[], Any], result: Any) -> None:
        """Run the step that is being exported again, without computing or tracing.

        Args:
            run: runs the step.
            result: what that returned in the recorded run.

        Raises:
            Differs: it makes other calls, fails, or returns something else.
        """
        traced = get_proxy_mode()
        if traced is None:
            raise Differs
        self._place, nodes = 0, len(traced.tracer.graph.nodes)
        try:
            again = run()
        except Exception as error:
            raise Differs from error
        returned = (_Call(*pytree.tree_flatten(each)) for each in (result, again))
        complete = not self._differ and self._place == len(self._calls) and nodes == len(traced.tracer.graph.nodes)
        if not complete or not next(returned).equals(next(returned)):
            raise Differs


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if type(one) in (SymInt, SymFloat, SymBool):
        return bool(one.node.expr == other.node.expr)
    if type(one) in (BuiltinFunctionType, MethodWrapperType):
        return bool(one == other)
    return type(one) in _VALUES and repr(one) == repr(other)


_VALUES = (bool, int, float, complex, str, slice, torch.dtype, torch.device, torch.layout, torch.memory_format)
