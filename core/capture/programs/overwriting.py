"""Finds operators that may write their result into an operand that nothing reads afterwards.

The sum of two gradients on a residual connection overwrites one of them; so does the gradient of an activation
function. Memory that was just written is in the cache, newly allocated memory is not: that is 2 % of a step's time on
the benchmark GPT. It also holds less memory.
"""

import operator
from collections.abc import Collection, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, fx

from ..graph.nodes import always_views
from ..graph.sizes import equal

aten = torch.ops.aten

_VARIANTS = {
    aten.add.Tensor: (aten.add.out, "out"),
    aten.sub.Tensor: (aten.sub.out, "out"),
    aten.mul.Tensor: (aten.mul.out, "out"),
    aten.div.Tensor: (aten.div.out, "out"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
}
"""Pointwise operators → the variant that writes to a given tensor, which may be an operand, and its argument."""

_FRESH = {
    *_VARIANTS,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.native_batch_norm_backward.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.clone.default,
    aten.cat.default,
}
"""Operators whose results never share memory with an input or with each other."""


def overwriting(
    nodes: Sequence[fx.Node], kept: Collection[fx.Node | None], fused: Collection[fx.Node] = ()
) -> dict[fx.Node, tuple[Any, str, fx.Node]]:
    """For each operator that may overwrite an operand: the operator to call, its argument, and the operand.

    An operand can be overwritten if its memory was allocated by an operator among ``nodes``, neither it nor a view of
    the same memory is read later or kept, and it has the same layout as the result.

    Args:
        nodes: of a program, in the order in which they run.
        kept: nodes that the program returns or passes to its sink.
        fused: nodes that run inside of a fused group, where nothing is overwritten.
    """
    place = {node: position for position, node in enumerate(nodes)}
    owner, last = _memories(nodes, place, kept)
    found: dict[fx.Node, tuple[Any, str, fx.Node]] = {}
    over: dict[fx.Node, fx.Node] = {}  # operator that allocates memory without overwriting → whose memory it has

    def memory(node: fx.Node) -> fx.Node | None:
        allocated = owner.get(node)
        while allocated in over:
            allocated = over[allocated]
        return allocated

    for node in nodes:
        if node.target not in _VARIANTS or node in fused:
            continue
        # The operand that was computed last is the most likely to be in the cache.
        operands = sorted((n for n in dict.fromkeys(node.all_input_nodes) if n in place), key=lambda n: -place[n])
        memories = [memory(operand) for operand in operands]
        for operand, own in zip(operands, memories, strict=True):
            if own and memories.count(own) == 1 and last[own] == place[node] and may_overwrite(node, operand):
                found[node] = (*_VARIANTS[node.target], operand)
                over[node], last[own] = own, last[node]
                break
    return found


def _memories(
    nodes: Sequence[fx.Node], place: dict[fx.Node, int], kept: Collection[fx.Node | None]
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, float]]:
    """For each node the operator of this program that allocated its memory, if that is known; and for each of these
    the place of its last reader, infinite if it is kept, or if a result may share it without saying so."""
    owner: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, float] = {}
    for node in nodes:
        source: Any = node.args[0] if node.args else None
        for read in node.all_input_nodes:
            if read in owner:
                last[owner[read]] = max(last[owner[read]], inf if _may_return_input(node) else place[node])
        picked = node.target is operator.getitem
        if node.target in _FRESH or (picked and source in place and source.target in _FRESH):
            owner[node], last[node] = node, place[node]
        elif isinstance(source, fx.Node) and source in owner and (picked or always_views(node.target)):
            owner[node] = owner[source]
        if node in owner and node in kept:
            last[owner[node]] = inf
    return owner, last


def may_overwrite(node: fx.Node, operand: fx.Node) -> bool:
    """Whether an operator can write its result over an operand, by its kind and the layout of both."""
    one, other = node.meta.get("val"), operand.meta.get("val")
    return (
        node.target in _VARIANTS
        and isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and (one.dtype, one.device) == (other.dtype, other.device)
        and equal((*one.shape, *one.stride()), (*other.shape, *other.stride()))
        and (other.is_contiguous() or (other.dim() == 4 and other.is_contiguous(memory_format=torch.channels_last)))
    )


def _may_return_input(node: fx.Node) -> bool:
    """Whether an operator's result may share memory with an input although its schema does not declare it."""
    target = node.target
    if target in _FRESH or target is operator.getitem or always_views(target):
        return False
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return True
    # Composite operators may return their input.
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
