"""Late numbers: Python numbers whose values are known at the end of a captured step.

A number that a step only returns, keeps or shows is not needed before. Other uses of its value, such as in a branch,
stop capture.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from .capture_errors import NeedsValue, Refused
from .raising_branches import value_without_error


class Run(Protocol):
    """A run of a step in which numbers are read; see `ValueWatch`."""

    started: bool
    over: bool
    shown: bool


def _late(function: Callable[..., Any], whole: bool = True) -> Callable[..., Any]:
    """A method of late numbers that computes as Python does with numbers.

    Args:
        function: computes the result from tensors.
        whole: whether integers give an integer.
    """

    def number(value: Any, real: bool) -> Any:
        if not isinstance(value, LateNumber):
            return value
        if real:
            return value.tensor.double()
        return value.tensor.long() if value.tensor.dtype == torch.bool else value.tensor

    def method(self: "LateNumber", *others: Any) -> Any:
        tensor = next((other for other in others if isinstance(other, Tensor)), None)
        kept = next((v for v in (self, *others) if isinstance(v, LateNumber) and v.watch.over), None)
        if kept is not None:  # a sum of what earlier runs kept, too, has no effect if it is only kept
            return kept.known() if tensor is not None else kept
        if tensor is not None:
            own = self.tensor.to(tensor.dtype) if tensor.is_floating_point() or tensor.is_complex() else self.tensor
            return function(own, *others)
        values = (self, *others)
        real = not whole or any(isinstance(v, float) or _is_real(v) for v in values)
        return LateNumber(function(*(number(value, real) for value in values)), self.watch)

    return method


def _is_real(value: Any) -> bool:
    return isinstance(value, LateNumber) and value.tensor.is_floating_point()


def _compared(function: Callable[..., Any]) -> Callable[..., Any]:
    """A comparison of late numbers, whose result is a late number, too."""
    compare = _late(function)

    def method(self: "LateNumber", other: Any) -> Any:
        return compare(self, other) if isinstance(other, int | float | Tensor) else NotImplemented

    return method


def _stops(name: str) -> Callable[..., Any]:
    def method(self: "LateNumber", *others: Any) -> Any:
        raise NeedsValue(f"{name} needs the value of a tensor")

    return method


class LateNumber:
    """A number whose value is known at the end of the step. Python may compute with it, print, log and return it.

    Other uses raise an error that names this class, which stops capture (see `capture_errors`).

    Args:
        tensor: without dimensions; its value will be the number.
        watch: the run in which it was read.
    """

    def __init__(self, tensor: Tensor, watch: Run) -> None:
        self.tensor = tensor
        self.watch = watch

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For ``isinstance``: the type of the number."""
        return float if self.tensor.is_floating_point() else bool if self.tensor.dtype == torch.bool else int

    def __format__(self, spec: str) -> str:
        self.watch.shown = True
        try:
            return format(math.nan, spec)
        except ValueError:  # of an integer, as "d"
            return "nan"

    def __repr__(self) -> str:
        return format(self, "")

    def __round__(self, digits: int | None = None) -> "LateNumber":
        if not _is_real(self):
            raise NeedsValue("round needs the value of a tensor")
        rounded = torch.round(self.tensor, decimals=digits or 0)
        return LateNumber(rounded.long() if digits is None else rounded, self.watch)

    def item(self) -> "LateNumber":
        return self

    def known(self) -> Tensor:
        """Its tensor.

        Raises:
            Refused: an earlier run of the step kept it.
        """
        if self.watch.over:
            raise Refused(kept_text("a number", "a number that was read from a tensor"))
        return self.tensor

    __add__, __radd__ = _late(operator.add), _late(lambda a, b: b + a)
    __sub__, __rsub__ = _late(operator.sub), _late(lambda a, b: b - a)
    __mul__, __rmul__ = _late(operator.mul), _late(lambda a, b: b * a)
    __truediv__, __rtruediv__ = _late(operator.truediv, whole=False), _late(lambda a, b: b / a, whole=False)
    __neg__, __pos__, __abs__ = _late(operator.neg), _late(operator.pos), _late(abs)
    __int__, __float__, __index__ = (_stops(name) for name in ("int", "float", "index"))
    __complex__, __trunc__, __floor__, __ceil__ = (_stops(name) for name in ("complex", "trunc", "floor", "ceil"))
    __lt__, __le__, __gt__ = _compared(operator.lt), _compared(operator.le), _compared(operator.gt)
    __ge__, __eq__, __ne__ = _compared(operator.ge), _compared(operator.eq), _compared(operator.ne)

    def __bool__(self) -> bool:
        self.known()
        if (found := value_without_error(self.watch.started)) is None:
            raise NeedsValue("bool needs the value of a tensor")
        return found


def kept_text(what: str, name: str) -> str:
    """The refusal of a step that uses a value of an earlier run, without its line."""
    return (
        f"the step uses {what} here that an earlier step computed and Python kept ({name}), but the Python of a "
        "captured step runs only once: keep it in a buffer of the model, which is allocated when the model is built"
    )


def holds_captured(value: Any) -> bool:
    """Whether a nesting contains a fake tensor or a late number."""
    return any(isinstance(leaf, FakeTensor) or type(leaf) is LateNumber for leaf in pytree.tree_leaves(value))


def with_late_numbers_as_tensors(result: Any) -> Any:
    """A step's result with tensors in place of late numbers."""
    return pytree.tree_map_only(LateNumber, lambda number: number.known(), result)
