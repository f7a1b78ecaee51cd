"""Which operators take at most one pass over memory, so that they may be computed again instead of being saved.

These are operators that work element by element or along rows, or that only move or fill memory. Not among them are
matrix products, convolutions and attention; random draws, which are keyed; regions; and operators that write in place.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ..graph.nodes import always_views

aten = torch.ops.aten

_ROWS_AND_LAYOUT = {
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._to_copy.default,
    aten.amax.default,
    aten.amin.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.copy.default,
    aten.fill.Scalar,
    aten.full.default,
    aten.full_like.default,
    aten.mean.default,
    aten.mean.dim,
    aten.native_dropout_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.new_full.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.scalar_tensor.default,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.stack.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.tril.default,
    aten.triu.default,
    aten.var.correction,
    aten.var_mean.correction,
    aten.zeros.default,
    aten.zeros_like.default,
}
"""Fusible operators without torch's pointwise tag."""

_DEVICES = {"cpu", "cuda"}


def fusible(node: fx.Node) -> bool:
    """Whether an operator takes at most one pass over memory; for views see `is_single_view`."""
    return _known(node) and _tensors_of(node)


def _known(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or target in _ROWS_AND_LAYOUT


def _tensors_of(node: fx.Node) -> bool:
    """Whether its inputs and results are strided real tensors, all on one device."""
    values = [value for one in (*node.all_input_nodes, node) for value in values_of(one)]
    return bool(values) and all(
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_complex()
        and value.device == values[-1].device
        and value.device.type in _DEVICES
        for value in values
    )


def values_of(node: fx.Node) -> list[Any]:
    """The fake values of a node, one for each result."""
    value = node.meta.get("val")
    return [v for v in value if v is not None] if isinstance(value, list | tuple) else [value]


def is_single_view(node: fx.Node) -> bool:
    """Whether a node returns one tensor that is a view of its only tensor argument."""
    target: Any = node.target
    return (
        node.op == "call_function"
        and always_views(target)
        and target.namespace == "aten"
        and not target._schema.is_mutable
        and isinstance(node.meta.get("val"), Tensor)
        and len(node.all_input_nodes) == 1
    )


def is_row_wise(node: fx.Node) -> bool:
    """Whether a node is fusible, a view, or a part of a result: it takes at most one pass over memory."""
    return fusible(node) or is_single_view(node) or node.target is operator.getitem


def parts(node: fx.Node) -> list[fx.Node]:
    """The nodes that select one of several results."""
    return [user for user in node.users if user.target is operator.getitem]
