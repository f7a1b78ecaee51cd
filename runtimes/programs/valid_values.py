"""Values that operators accept, for programs that run on invented inputs, such as zeros in a warm-up.

A stage may index with positions that an earlier stage computes, or with what it computes from them. On zeros that may
be ``zeros - 1``, or memory that a permutation was to fill. A CPU then raises an error, and no later operator runs on a
CUDA device of this process.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_POSITIONS = {"index", "indices", "target", "offsets", "offs"}
"""Names of arguments that are positions in another tensor, in the schemas of operators."""
_PROBABILITIES = {
    aten.multinomial.default, aten.bernoulli.default, aten.bernoulli.out, aten.binary_cross_entropy.default,
}  # fmt: skip
"""Operators that check their first argument on a CUDA device."""
_ASSERTIONS = {aten._assert_async.default, aten._assert_async.msg}
_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64}
"""Dtypes of positions; others are those of masks and values."""


class ValidValues(TorchDispatchMode):
    """Inside, operators index with zeros and draw by probabilities of one half; assertions hold."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASSERTIONS:
            return None
        if func in _PROBABILITIES:
            args = torch.full_like(args[0], 0.5), *args[1:]
        elif isinstance(func, torch._ops.OpOverload):
            places = [i for i, each in enumerate(func._schema.arguments) if each.name in _POSITIONS]
            if places:
                args = tuple(pytree.tree_map(_first, each) if i in places else each for i, each in enumerate(args))
                kwargs = {k: pytree.tree_map(_first, v) if k in _POSITIONS else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _first(value: Any) -> Any:
    """Position 0 for each position."""
    return torch.zeros_like(value) if isinstance(value, Tensor) and value.dtype in _INTEGERS else value
