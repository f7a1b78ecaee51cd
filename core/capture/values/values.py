"""Python code that needs a tensor's value while a step is captured and tensors have none.

A number that a step only prints, logs or returns is not needed before the end of the step: it is a `LateNumber`. Any
other use of a value, such as a branch, stops capture: `NeedsValue`.
"""

import operator
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .raising import value_without_error
from .sparse_tensors import is_sparse
from .texts import number_mark, tensor_mark
from .user_lines import error_chain


class NeedsValue(Exception):
    """Python needs the value of a captured tensor, or something else that a captured graph does not have."""


class NeedsAutograd(NeedsValue):
    """Python computes gradients within the step."""


class Refused(Exception):
    """The step does something that neither a captured graph nor a region supports."""


class LateSize(RuntimeError):
    """A captured tensor has a data-dependent size.

    Args:
        message: what has it.
        module: name of the innermost module that contains it, "" for the model itself.
    """

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


_SAYS_SO = (
    "data-dependent", "unbacked", "got FakeTensor", "data is not allocated", "LateNumber",
    "type float is not JSON serializable", "type int is not JSON serializable",
)  # fmt: skip
"""Parts of messages of errors that mean that a value is needed."""


E = TypeVar("E", bound=BaseException)


def error_of_type(kind: type[E], error: BaseException | None) -> E | None:
    """The first error of a type in an error's chain."""
    return next((link for link in error_chain(error) if isinstance(link, kind)), None)


def depends_on_value(error: BaseException | None) -> bool:
    """Whether an error means that something needs a tensor's value."""
    return any(
        isinstance(link, NeedsValue)
        or any(part in type(link).__name__ for part in ("DataDependent", "DynamicOutputShape"))
        or any(part in str(link) for part in _SAYS_SO)
        for link in error_chain(error)
    )


_READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
    Tensor.__complex__, Tensor.__array__, Tensor.__repr__, Tensor.__format__, Tensor.__contains__,
    torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero,
}  # fmt: skip
"""Functions that convert tensors to Python values."""


def reads_values(func: Any) -> bool:
    """Whether a function converts a tensor to a Python value."""
    return func in _READS


def is_unknown(value: Any) -> bool:
    """Whether a tensor has no value while a step is captured."""
    return isinstance(value, FakeTensor) and value.constant is None


class ValueWatch(TorchFunctionMode):
    """A mode in which a number read from a captured tensor is a `LateNumber`, and any other use of a value stops.

    Args:
        sizes: whether sizes that depend on values stop capture, too; capture supports some of them.

    Attributes:
        texts: tensors that were written into text, by their number in it.
        started: whether an operator has read a parameter.
    """

    def __init__(self, sizes: bool) -> None:
        super().__init__()
        self._sizes = sizes
        self._drawn = _draws()
        self.texts: list[Tensor] = []
        self.started = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.started = self.started or any(isinstance(v, nn.Parameter) for v in pytree.tree_leaves((args, kwargs)))
        if _draws() != self._drawn:
            raise Refused(
                "the step draws random numbers from Python or numpy: captured, they would be the same in each step; "
                "draw with torch, or give them with the batch"
            )
        if func == _SETS_DATA:
            raise Refused("the step assigns .data, which cannot be captured: write into it by .copy_ under no_grad")
        if func == _GETS_DATA:
            return args[0].detach()  # tracing would record it as a constant
        if func in _READS and any(is_unknown(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            return self._read(func, args)
        if func in _NEED_VALUES or getattr(func, "__name__", "") == "_pack_padded_sequence":
            raise NeedsValue(f"{func.__name__} needs the values of its lengths")
        if func in _DIFFERENTIATES:
            raise NeedsAutograd(f"{func.__name__} differentiates in the middle of the step")
        if getattr(func, "__module__", "") == "torch._functorch.predispatch":
            raise NeedsValue("torch.vmap and torch.func transform Python, which is not captured")
        result = func(*args, **kwargs)
        if is_sparse(result):
            raise NeedsValue(f"{getattr(func, '__name__', func)} creates a sparse tensor, which is not captured")
        if self._sizes and any(map(_of_unknown_size, pytree.tree_leaves(result))):
            raise NeedsValue(f"the size of what {getattr(func, '__name__', func)} returns depends on values")
        return result

    def _read(self, func: Any, args: Any) -> Any:
        tensor = args[0]
        if func is Tensor.__bool__ and tensor.numel() == 1 and (found := value_without_error(self.started)) is not None:
            return found
        if tensor.numel() != 1 or tensor.is_complex() or func not in (Tensor.item, Tensor.__format__, Tensor.__repr__):
            raise NeedsValue(f"{getattr(func, '__name__', str(func)).strip('_')} needs the value of a tensor")
        value = tensor.detach().reshape(()).clone()  # the step may write the tensor later
        number = LateNumber(value.double() if value.is_floating_point() else value, self)  # as Python has them
        if func is Tensor.item:
            return number
        spec = args[1] if func is Tensor.__format__ else ""
        if func is Tensor.__format__ and tensor.dim() == 0 and not isinstance(tensor, nn.Parameter):
            return format(number, spec)
        return tensor_mark(self.late(value), tensor) if not spec else object.__format__(tensor, spec)

    def late(self, value: Tensor) -> int:
        """Add a value without dimensions to ``texts``; return its number."""
        self.texts.append(value.double())
        return len(self.texts) - 1


def _draws() -> int:
    """A number that changes when Python or numpy draws a random number."""
    numpy_state: Any = numpy.random.get_state()
    return hash((random.getstate(), numpy_state[1].tobytes(), numpy_state[2:]))


_GETS_DATA, _SETS_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


def _of_unknown_size(value: Any) -> bool:
    return isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


_NEED_VALUES = {torch.nn.functional.ctc_loss, torch.ctc_loss}
_DIFFERENTIATES = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


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

    Args:
        tensor: without dimensions; its value will be the number.
        watch: records the values that are written into text.
    """

    def __init__(self, tensor: Tensor, watch: ValueWatch) -> None:
        self.tensor = tensor
        self.watch = watch

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For ``isinstance``: the type of the number."""
        return float if self.tensor.is_floating_point() else bool if self.tensor.dtype == torch.bool else int

    def __format__(self, spec: str) -> str:
        return number_mark(self.watch.late(self.tensor), self.tensor.dtype, spec)

    def __repr__(self) -> str:
        return format(self, "")

    def __round__(self, digits: int | None = None) -> "LateNumber":
        if not _is_real(self):
            raise NeedsValue("round needs the value of a tensor")
        rounded = torch.round(self.tensor, decimals=digits or 0)
        return LateNumber(rounded.long() if digits is None else rounded, self.watch)

    def item(self) -> "LateNumber":
        return self

    __add__, __radd__ = _late(operator.add), _late(lambda a, b: b + a)
    __sub__, __rsub__ = _late(operator.sub), _late(lambda a, b: b - a)
    __mul__, __rmul__ = _late(operator.mul), _late(lambda a, b: b * a)
    __truediv__, __rtruediv__ = _late(operator.truediv, whole=False), _late(lambda a, b: b / a, whole=False)
    __neg__, __pos__, __abs__ = _late(operator.neg), _late(operator.pos), _late(abs)
    __int__, __float__, __index__ = (_stops(name) for name in ("int", "float", "index"))
    __complex__, __trunc__, __floor__, __ceil__ = (_stops(name) for name in ("complex", "trunc", "floor", "ceil"))
    __lt__, __le__, __gt__ = _compared(operator.lt), _compared(operator.le), _compared(operator.gt)
    __ge__, __eq__, __ne__ = _compared(operator.ge), _compared(operator.eq), _compared(operator.ne)
    __floordiv__, __rfloordiv__, __mod__, __rmod__ = (_stops("a division with a remainder") for _ in range(4))
    __divmod__, __rdivmod__, __rpow__, __hash__ = (_stops(name) for name in ("divmod", "divmod", "pow", "hash"))
    __and__, __rand__, __or__, __ror__, __xor__, __rxor__ = (_stops("logic") for _ in range(6))
    __invert__, __lshift__, __rshift__, __reduce_ex__ = (_stops(name) for name in ("~", "<<", ">>", "a copy"))

    def __bool__(self) -> bool:
        if (found := value_without_error(self.watch.started)) is None:
            raise NeedsValue("bool needs the value of a tensor")
        return found

    def __pow__(self, power: Any) -> "LateNumber":
        if isinstance(power, int | float) and power == abs(power):
            return _late(operator.pow)(self, power)  # type: ignore[no-any-return]
        raise NeedsValue("pow needs the value of a tensor")

    def __getattr__(self, name: str) -> Any:
        if name in _OF_NUMBERS:
            raise NeedsValue(f"{name} needs the value of a tensor")
        raise AttributeError(name)


_OF_NUMBERS = {name for kind in (int, float) for name in dir(kind) if not name.startswith("__")}
"""Attributes of numbers that late numbers do not have."""


def holds_captured(value: Any) -> bool:
    """Whether a nesting contains a fake tensor or a late number."""
    return any(isinstance(leaf, FakeTensor) or type(leaf) is LateNumber for leaf in pytree.tree_leaves(value))


def holds_late_numbers(value: Any) -> bool:
    """Whether a nesting contains a late number."""
    return any(type(leaf) is LateNumber for leaf in pytree.tree_leaves(value))


def with_late_numbers_as_tensors(result: Any) -> Any:
    """A step's result with tensors in place of late numbers."""
    return pytree.tree_map_only(LateNumber, lambda number: number.tensor, result)
