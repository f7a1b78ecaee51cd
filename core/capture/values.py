"""Python that asks for a tensor's value, while a step is captured and there is none.

A number that a step only prints, logs or returns needs no value before the step is over: `LateNumber` stands for it.
Everything else that asks, such as a branch, is a point where capture must stop: `NeedsValue`.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class NeedsValue(Exception):
    """Python needs the value of a tensor that is being captured."""


_READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
    Tensor.__complex__, Tensor.__array__, Tensor.__repr__, Tensor.__format__, Tensor.__contains__,
    torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero,
}  # fmt: skip
"""What turns tensors into Python values."""

_SIZED_BY_VALUES = {
    torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.masked_select, Tensor.masked_select,
    torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive, torch.bincount, Tensor.bincount,
    torch._unique2, torch.functional._return_output, torch.functional._return_inverse, torch.functional._return_counts,
}  # fmt: skip
"""What returns tensors whose sizes depend on values."""


def reads_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call gives Python the value of a tensor."""
    return func in _READS


def sized_by_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the size of what a call returns depends on values."""
    if func in _SIZED_BY_VALUES:
        return True
    if func in (torch.where, Tensor.where):
        return len(args) + len(kwargs) == 1
    if func in (torch.repeat_interleave, Tensor.repeat_interleave):
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
        return isinstance(repeats, Tensor) and kwargs.get("output_size") is None
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        masked = any(
            isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in pytree.tree_leaves(args[1])
        )
        return masked and (func is Tensor.__getitem__ or (isinstance(args[2], Tensor) and args[2].numel() > 1))
    return False


def is_unknown(value: Any) -> bool:
    """Whether a tensor has no value while a step is captured."""
    return isinstance(value, FakeTensor) and value.constant is None


class ValueWatch(TorchFunctionMode):
    """Within, a number read from a captured tensor is a `LateNumber`, and everything else that reads one stops.

    Args:
        sizes: whether sizes that depend on values stop capture, too. Capture can carry some of them along.

    Attributes:
        texts: tensors that were written into text, by their number in it.
    """

    def __init__(self, sizes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = sizes
        self.texts: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reading = reads_values(func, args, kwargs)
        if (reading or (self._sizes and sized_by_values(func, args, kwargs))) and any(
            is_unknown(leaf) for leaf in pytree.tree_leaves((args, kwargs))
        ):
            tensor = args[0]
            if tensor.numel() == 1 and func in (Tensor.item, Tensor.__format__, Tensor.__repr__):
                value = tensor.detach().reshape(())
                number = LateNumber(value.double() if value.is_floating_point() else value, self)  # as Python has them
                if func is Tensor.item:
                    return number
                return format(number, args[1] if func is Tensor.__format__ else "")
            raise NeedsValue(f"{getattr(func, '__name__', func)} needs the value of a tensor")
        return func(*args, **kwargs)


MARK = "\x00"
"""Stands around the number of a late value in a text, and its format."""


def _late(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: "LateNumber", *others: Any) -> "LateNumber":
        values = [other.tensor if isinstance(other, LateNumber) else other for other in others]
        return LateNumber(function(self.tensor, *values), self.watch)

    return method


def _stops(name: str) -> Callable[..., Any]:
    def method(self: "LateNumber", *others: Any) -> Any:
        raise NeedsValue(f"{name} needs the value of a tensor")

    return method


class LateNumber:
    """A number that is known when the step is over: it can be computed with, printed, logged and returned.

    Args:
        tensor: of no dimensions; what the number will be.
        watch: knows what was written into text.
    """

    def __init__(self, tensor: Tensor, watch: ValueWatch) -> None:
        self.tensor = tensor
        self.watch = watch

    def __format__(self, spec: str) -> str:
        self.watch.texts.append(self.tensor.double())
        kind = "f" if self.tensor.is_floating_point() else "b" if self.tensor.dtype == torch.bool else "i"
        return f"{MARK}{len(self.watch.texts) - 1}{kind}:{spec}{MARK}"

    def __repr__(self) -> str:
        return format(self, "")

    def __round__(self, digits: int | None = None) -> "LateNumber":
        return LateNumber(torch.round(self.tensor, decimals=digits or 0), self.watch)

    def item(self) -> "LateNumber":
        return self

    __add__, __radd__ = _late(operator.add), _late(lambda a, b: b + a)
    __sub__, __rsub__ = _late(operator.sub), _late(lambda a, b: b - a)
    __mul__, __rmul__ = _late(operator.mul), _late(lambda a, b: b * a)
    __truediv__, __rtruediv__ = _late(operator.truediv), _late(lambda a, b: b / a)
    __pow__, __neg__, __abs__ = _late(operator.pow), _late(operator.neg), _late(abs)
    __bool__, __int__, __float__, __index__ = (_stops(name) for name in ("bool", "int", "float", "index"))
    __lt__, __le__, __gt__, __ge__ = (_stops("a comparison") for _ in range(4))  # type: ignore[assignment]


def with_late_numbers_as_tensors(result: Any) -> Any:
    """A step's result with tensors where it has late numbers."""
    return pytree.tree_map_only(LateNumber, lambda number: number.tensor, result)


def filled_in(text: str, values: list[float]) -> str:
    """A text with the values of its late numbers.

    Args:
        text: as the step wrote it.
        values: of the late numbers, by number.
    """
    parts = text.split(MARK)
    for i in range(1, len(parts), 2):
        number, _, spec = parts[i].partition(":")
        parts[i] = format(_KINDS[number[-1]](values[int(number[:-1])]), spec)
    return "".join(parts)


_KINDS: dict[str, Callable[[float], Any]] = {"f": float, "i": int, "b": bool}
