"""Finds operators that may write their result into an operand that nothing reads afterwards.

The sum of two gradients on a residual connection overwrites one of them; so does the gradient of an activation
function. Memory that was just written is in the cache, newly allocated memory is not: that is 2 % of a step's time on
the benchmark GPT. It also holds less memory.
"""

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..graph.nodes import always_views

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
    found: dict[fx.Node, tuple[Any, str, fx.Node]] = {}
    for node in nodes:
        if node.target not in _VARIANTS or node in fused:
            continue
        # The operand that was computed last is the most likely to be in the cache.
        operands = sorted((n for n in dict.fromkeys(node.all_input_nodes) if n in place), key=lambda n: -place[n])
        for operand in operands:
            if may_overwrite(node, operand) and _is_last_read(operand, node, place, kept, found):
                function, name = _VARIANTS[node.target]
                found[node] = function, name, operand
                break
    return found


def may_overwrite(node: fx.Node, operand: fx.Node) -> bool:
    """Whether an operator can write its result over an operand, by its kind and the layout of both."""
    one, other = node.meta.get("val"), operand.meta.get("val")
    return (
        node.target in _VARIANTS
        and isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and (one.dtype, one.shape, one.stride(), one.device) == (other.dtype, other.shape, other.stride(), other.device)
        and (other.is_contiguous() or (other.dim() == 4 and other.is_contiguous(memory_format=torch.channels_last)))
    )


def _is_last_read(
    operand: fx.Node,
    reader: fx.Node,
    place: dict[fx.Node, int],
    kept: Collection[fx.Node | None],
    overwritten: dict[fx.Node, tuple[Any, str, fx.Node]],
) -> bool:
    """Whether ``reader`` is the last to read the memory of ``operand``, which an operator of this program allocated."""
    owner = _owner(operand, place, overwritten)
    if owner is None:
        return False
    todo, seen = [owner], set[fx.Node]()
    while todo:
        alias = todo.pop()
        if alias in seen:
            continue
        seen.add(alias)
        if alias in kept or (alias is not operand and alias in reader.all_input_nodes):
            return False
        for user in alias.users:
            if user not in place:
                continue  # another program's
            if user is reader:
                continue
            if place[user] > place[reader]:
                return False
            shares = _shares(user, alias, overwritten)
            if shares is None:
                return False
            if shares:
                todo.append(user)
    return True


def _owner(
    node: fx.Node, place: dict[fx.Node, int], overwritten: dict[fx.Node, tuple[Any, str, fx.Node]]
) -> fx.Node | None:
    """The operator of this program that allocated a tensor's memory; None if there is none, or it is not known."""
    while node in place:
        if node in overwritten:
            node = overwritten[node][2]
        elif node.target is operator.getitem:
            source: Any = node.args[0]
            if source in place and source.target in _FRESH:
                return node
            node = source
        elif node.target in _FRESH:
            return node
        elif always_views(node.target):
            node = node.args[0]  # type: ignore[assignment]
        else:
            return None
    return None


def _shares(user: fx.Node, alias: fx.Node, overwritten: dict[fx.Node, tuple[Any, str, fx.Node]]) -> bool | None:
    """Whether an operator's result shares memory with an input; None if that is not known."""
    if user in overwritten:
        return overwritten[user][2] is alias
    if user.target is operator.getitem or always_views(user.target):
        return True
    target = user.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    if torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
        return None  # composite operators may return their input
    return False
