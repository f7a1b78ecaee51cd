"""Results with the strides that they were traced with.

A program is traced over fake tensors, and the trace depends on their strides: whether a reshape is a `view` or a copy,
whether `contiguous` copies, which memory format a kernel detects. Real kernels do not always return the strides of
their fake versions: BatchNorm and convolutions of transposed inputs do not, and with one row a tensor's stride along
the rows is arbitrary. If they may differ, a program compares them, and copies a result with other strides. So all later
operators, in this stage and in others, get what they were traced with.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.nodes import always_views

aten = torch.ops.aten

Strides = tuple[int, ...]

_CONTIGUOUS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
"""Operators whose result is contiguous whatever the strides of their operands are."""


def strides_to_check(node: fx.Node) -> Strides | None:
    """The strides that a node's result must have, if its kernel may return others.

    Args:
        node: of a traced graph.

    Returns:
        The strides; None if the result is not a tensor, or always has them.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    if value.numel() == 0 or _by_definition(node, value) or not is_non_overlapping_and_dense_or_false(value):
        return None
    strides = value.stride()
    return None if free_unbacked_symbols(strides) else strides


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
    """The tensor with other strides: a view if only dimensions of one element differ, otherwise a copy.

    Args:
        tensor: any.
        strides: of a dense tensor with its shape.
    """
    shape = tensor.shape
    if all(a == b or n == 1 for a, b, n in zip(tensor.stride(), strides, shape, strict=True)):
        return tensor.as_strided(shape, strides)
    copied = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor)
