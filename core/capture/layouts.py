"""Kernels that insist on a layout, called with what is there.

With one row a tensor's stride along the rows means nothing, and an operator may give it another one for real than over
fake tensors. Group normalisation reads the memory format off all strides and refuses what it takes for another one;
traced over fake tensors, nothing is in front of it that would put that right, as eager's composite operator does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


def _group_norm(x: Tensor, *others: Any) -> Any:
    return aten.native_group_norm.default(x.contiguous(memory_format=suggest_memory_format(x)), *others)


def _group_norm_backward(gradient: Tensor, x: Tensor, *others: Any) -> Any:
    layout = suggest_memory_format(x)
    x, gradient = (tensor.contiguous(memory_format=layout) for tensor in (x, gradient))
    return aten.native_group_norm_backward.default(gradient, x, *others)


_CALLS: dict[Any, Callable[..., Any]] = {
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
}


def function_of(target: Any) -> Callable[..., Any]:
    """What a program calls for an operator of a graph."""
    found: Callable[..., Any] = _CALLS.get(target) or getattr(target, "_op", target)
    return found
