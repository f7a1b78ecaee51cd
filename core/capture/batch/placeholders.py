"""Placeholder values of tensors, for a step that runs on fake tensors."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..values.nesting import tensors_of
from ..values.raising_branches import value_without_error

MAX_OPERATORS = 50_000
"""Largest number of operators of a trace: a loop that waits for a value, which fake tensors do not have, never ends."""

_UNKNOWN_ROWS = 7
"""Number of rows of a selection that depends on values; a prime, so that it is no other size."""


class TooLong(Exception):
    """A trace ran more than ``MAX_OPERATORS`` operators."""


class PlaceholderResults(TorchDispatchMode):
    """A mode in which operators whose result depends on values return placeholders, so that the step continues.

    Numbers are 0 or 1; selections have some rows, or all of them if every bool is True.

    Args:
        truth: the value of every bool.

    Attributes:
        asked: whether the step needed a value, or a selection.
    """

    def __init__(self, truth: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._truth = truth
        self.asked = False
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._count += 1
        if self._count > MAX_OPERATORS:
            raise TooLong(f"the step runs more than {MAX_OPERATORS} operators")
        given = tensors_of((args, kwargs))
        self.note_inputs(given)
        name = func._schema.name.partition("::")[2]
        if given and (found := self._of_unknown_value(name, args)) is not NotImplemented:
            return found
        if name == "_grouped_mm" and args[0].ndim == 2 and args[1].ndim == 3:  # its fake form supports bfloat16 only
            return args[0].new_empty((args[0].shape[0], args[1].shape[-1]))
        if name in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"):
            args = (args[0], self._with_row_numbers(args[1]), *args[2:])
        result = _counts(*args, **kwargs) if name == "bincount" else func(*args, **kwargs)
        self.note_call(func, args, kwargs, given, result)
        return result

    def note_inputs(self, given: Sequence[Tensor]) -> None:
        """Called with the input tensors of every operator, before it runs."""

    def note_call(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], result: Any) -> None:
        """Called after every operator that ran."""

    def note_selection(self, indices: Tensor) -> None:
        """Called with the placeholder of every selection."""

    def selected_rows(self, tensor: Tensor) -> int:
        """Number of rows of a selection from a tensor, unless every bool is True."""
        return _UNKNOWN_ROWS

    def _of_unknown_value(self, name: str, args: Any) -> Any:
        tensor = args[0]
        if name == "_local_scalar_dense":
            self.asked = True
            return self._truth if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
        if name == "equal":
            self.asked = True
            return self._truth
        if name == "nonzero":
            return self._selected(tensor, (tensor.ndim,), torch.int64)
        if name == "masked_select":
            return self._selected(tensor, (), tensor.dtype)
        if name in ("_unique2", "unique_consecutive") and len(args) < 4:
            picked = self._selected(tensor, (), tensor.dtype)
            return picked, torch.empty_like(tensor, dtype=torch.int64), torch.empty_like(picked, dtype=torch.int64)
        return NotImplemented

    def _selected(self, tensor: Tensor, rest: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.asked = True
        rows = tensor.numel() if self._truth else self.selected_rows(tensor)
        found = tensor.new_empty((rows, *rest), dtype=dtype)
        self.note_selection(found)
        return found

    def _with_row_numbers(self, indices: Sequence[Any]) -> list[Any]:
        """Indices in which masks are replaced by row numbers of the selected rows."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                found += [self._selected(index, (), torch.int64)] * index.ndim
            else:
                found.append(index)
        return found


def _counts(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """A placeholder for counts of each value, which are as many as ``minlength`` where the values are below it."""
    kind = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return values.new_empty((max(minlength, 1),), dtype=kind)


class PlaceholderValues(TorchFunctionMode):
    """A mode in which ``numpy()`` of a fake tensor returns zeros, texts contain the number that ``item()`` returns, and
    checks that raise an error pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], FakeTensor):
            tensor = args[0]
            if func in (Tensor.numpy, Tensor.__array__):
                return numpy.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if func is Tensor.__format__ and tensor.dim() == 0:
                return format(tensor.item(), args[1])
            if func is Tensor.__bool__ and (found := value_without_error()) is not None:
                return found
        return func(*args, **(kwargs or {}))
