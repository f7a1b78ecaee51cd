"""The values of constants: tensors that a step computes without the batch, parameters and random numbers.

A step that runs on fake tensors has no values. Therefore its constants, such as a table of positions or a mask, are
also computed with real tensors, if they are small.
"""

from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any
from zlib import crc32

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ..graph.nodes import written_tensors
from ..values.nesting import tensors_of
from .kept_tensors import takes_no_values

_LARGEST = 1 << 24
"""Largest number of elements of a tensor whose values are computed: 64 MB of float32, a mask of 4096 x 4096."""
_NEAR = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-6, torch.complex64: 1e-6}
"""Relative and absolute tolerance, because kernels may round differently for tensors of other shapes."""
_NEAR_IN_LOWER = 1e-2
"""The same for lower precisions."""


@frozen(eq=False)
class Constant:
    """An argument of an operator that has the same values in every run.

    Args:
        shape, dtype: of the tensor.
        value: a copy of its values; None if they are not known.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Tensor | None

    def __eq__(self, other: object) -> bool:
        """Whether both are the same constant, up to rounding; unknown values equal each other."""
        if not isinstance(other, Constant) or (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        if self.value is None or other.value is None or self.value is other.value:
            return self.value is other.value
        with _disable_current_modes():
            if not (self.dtype.is_floating_point or self.dtype.is_complex):
                return torch.equal(self.value, other.value)
            near = _NEAR.get(self.dtype, _NEAR_IN_LOWER)
            return torch.allclose(self.value, other.value, rtol=near, atol=near, equal_nan=True)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))


@define(eq=False)
class ConstantValues:
    """The values of constants, by their fake tensors.

    Args:
        known: fake tensors of the model that no run writes → their values.
    """

    known: MutableMapping[Tensor, Tensor] = field(factory=WeakIdKeyDictionary)
    _copies: dict[int, Tensor] = field(factory=dict)
    _users: MutableMapping[Tensor, Tensor] = field(factory=WeakIdKeyDictionary)

    def constant(self, tensor: Tensor) -> Constant:
        """A constant with the value that it has now."""
        value = self._value(tensor)
        return Constant(tuple(tensor.shape), tensor.dtype, None if value is None else self._copy(value))

    def compute(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the result of an operator of constants, if all its arguments are known and small.

        Args:
            func: the operator.
            args, kwargs: its arguments, which are constants.
            result: its result on fake tensors.
        """
        given, fakes = tensors_of((args, kwargs)), tensors_of(result)
        values: list[Tensor] | None = None
        if all(tensor.numel() <= _LARGEST for tensor in (*given, *fakes)):
            with suppress(Exception), _disable_current_modes(), torch.no_grad():
                shapes_alone = takes_no_values(func)
                real = pytree.tree_map_only(Tensor, lambda t: self._given(t, shapes_alone), (args, kwargs))
                values = tensors_of(func(*real[0], **real[1]))
        if values is None or len(values) != len(fakes):
            for tensor in (*fakes, *written_tensors(func, args, kwargs)):
                self.known.pop(tensor, None)
            return
        for tensor, value in zip(fakes, values, strict=True):
            self.known[tensor] = value

    def _given(self, tensor: Tensor, shape_alone: bool) -> Tensor:
        value = self._value(tensor)
        if value is None and not shape_alone:
            raise LookupError("a value that is not known")
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype) if value is None else value

    def _value(self, tensor: Tensor) -> Tensor | None:
        found: Tensor | None
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            found = self.known.get(tensor)
            return found
        if tensor not in self._users:  # a trial does not write the user's own tensor
            with _disable_current_modes():
                self._users[tensor] = tensor.detach().clone()
        found = self._users[tensor]
        return found

    def _copy(self, value: Tensor) -> Tensor:
        """A copy; the same one for equal values, so that a mask that every layer reads is kept once."""
        with _disable_current_modes():
            key = hash((tuple(value.shape), value.dtype, digest_of_values(value)))
            kept = self._copies.get(key)
            if kept is None or not torch.equal(kept, value):
                kept = self._copies[key] = value.clone()
        return kept


def digest_of_values(tensor: Tensor) -> int:
    """32 bits over the bytes of a tensor's values; 0 if it has none."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return crc32(flat.numpy().data) if flat.numel() else 0
