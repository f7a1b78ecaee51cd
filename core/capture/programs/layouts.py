"""Results with the strides that they were traced with.

A program is traced over fake tensors, and what is traced depends on their strides: whether a reshape is a `view` or a
copy, whether `contiguous` does anything, what a kernel that reads the memory format off the strides finds. Kernels do
not always return the strides that their fake ones predict: BatchNorm and convolutions of transposed inputs do not, and
with one row a tensor's stride along the rows is arbitrary. Where they may differ, a program compares, and copies a
result that has other strides. Everything after it, in this stage and in the others, is then as it was traced.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import is_non_overlapping_and_dense_or_false

from ..graph.nodes import always_views

aten = torch.ops.aten

Strides = tuple[int, ...]

_CONTIGUOUS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
"""Operators whose result is contiguous whatever the strides of their operands are."""


def strides_to_check(node: fx.Node) -> Strides | None:
    """The strides that a node's result has to have, where its kernel may return others.

    Args:
        node: of a traced graph.

    Returns:
        The strides; None where the result is no tensor, or has them by definition.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    if value.numel() == 0 or _by_definition(node, value) or not is_non_overlapping_and_dense_or_false(value):
        return None
    strides = value.stride()
    return strides if all(type(stride) is int for stride in strides) else None


def _by_definition(node: fx.Node, value: Tensor) -> bool:
    target = node.target
    if target is operator.getitem:
        source: Any = node.args[0]
        return always_views(source.target)
    if always_views(target) or target in _CONTIGUOUS:
        return True
    if torch.Tag.pointwise not in getattr(target, "tags", ()) and node.all_input_nodes:
        return False
    values = [value, *(source.meta.get("val") for source in node.all_input_nodes)]
    return all(isinstance(v, Tensor) and v.is_contiguous() for v in values)


def restrided(tensor: Tensor, strides: Strides) -> Tensor:
    """The tensor with other strides: a view where only dimensions of one element differ, else a copy.

    Args:
        tensor: any.
        strides: those of a tensor of its shape that fills its memory.
    """
    shape = tensor.shape
    if all(a == b or n == 1 for a, b, n in zip(tensor.stride(), strides, shape, strict=True)):
        return tensor.as_strided(shape, strides)
    copied = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor)
