"""What the backward computes again instead of saving it: casts to a narrower dtype, and wide tensors.

**Casts to a narrower dtype.** Under autocast a normalisation returns float32, and the product after it reads a copy in
bfloat16. The backward of the product reads the copy, that of the normalisation its float32 input: per microbatch both
would be saved, which the same model cast by hand does not need::

    F            add ─▶ layer_norm ─▶ cast ─▶ mm
                  │ saved                │ not saved
    backward      ╰──▶ layer_norm ─▶ cast ─▶ mm of the weight's gradient

It has the same bits, and takes one more pass over memory. A cast is computed again if only operators that work element
by element or along rows are between it and tensors that the backward reads anyway. If the backward is split, I computes
it and hands it to W, so that what only I reads is freed before W.

**Wide tensors**, computed again from narrow ones. Under autocast a loss over a large vocabulary casts the bfloat16
logits to float32, and its backward reads the float32 log-softmax. Per microbatch that is twice what the same model
cast by hand saves. The logits are saved instead::

    F            mm ─▶ logits ─▶ cast ─▶ log_softmax ─▶ loss
                       │ saved                │ not saved
    backward           ╰──▶ cast ─▶ log_softmax ─▶ gradient of the logits

It has the same bits, and takes one more pass over memory. A tensor is computed again if a widening operator and at most
one more that works element by element or along rows are between it and what is saved then, and if the saved bytes fall.

Operators that work element by element or along rows, or that only move or fill memory, take at most one pass over
memory. Not among them are matrix products, convolutions and attention; random draws, which are keyed; regions; and
operators that write in place.
"""

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

from ..graph.nodes import always_views, ancestors
from ..graph.sizes import hint
from .joint_graph import JointGraph, closed_over, ordered

aten = torch.ops.aten

MOST_NARROW, MOST_WIDE = 8, 2
"""Largest numbers of operators that are computed again: for a cast, those of a normalisation spelled out; for a wide
tensor."""
LEAST_BYTES = 4096
"""Smaller savings of wide tensors are not worth an operator."""


def recompute(
    joint: JointGraph, in_forward: Collection[fx.Node], shared: Collection[fx.Node], fixed: Collection[fx.Node]
) -> set[fx.Node]:
    """Change a joint graph so that its backward computes casts and wide tensors again instead of saving them.

    Args:
        joint: forward and backward of a stage; its graph is changed in place.
        in_forward: the nodes of F.
        shared: the nodes that all microbatches share.
        fixed: inputs that are held until the backward, and that no microbatch changes.

    Returns:
        The added nodes, which belong to the backward.
    """
    return {node for narrow in (True, False) for node in _recomputed(joint, in_forward, {*shared, *fixed}, narrow)}


def _recomputed(
    joint: JointGraph, in_forward: Collection[fx.Node], kept: Collection[fx.Node], narrow: bool
) -> set[fx.Node]:
    """Compute casts again, or else wide tensors; see `recompute`.

    Args:
        kept: shared nodes and fixed inputs.
        narrow: which of them.
    """
    backward = ancestors(joint.gradients.values()).difference(in_forward, kept)
    shows: dict[fx.Node, list[fx.Node]] = {}
    for node in closed_over(ordered(joint.graph, backward), backward):
        if node not in joint.gradients.values():
            shows.setdefault(shown_by(node), []).append(node)
    roots = [root for root in shows if root in in_forward and (not narrow or narrows(root))]
    held = set(shows).union(kept).difference(roots if narrow else ())
    changed = {joint.primals[i] for i in joint.mutations}
    sources, added = set[fx.Node](), set[fx.Node]()
    for root in roots:
        if root in sources:
            continue
        rest = held - {root}
        stops = lambda node, source, rest=rest: (  # noqa: E731
            (not narrow and widens(node)) or shown_by(source) in rest
        )
        nodes, read = _computed_from(shows[root], stops, MOST_NARROW if narrow else MOST_WIDE) or (set(), set())
        new = {shown_by(node) for node in read} - held
        worth = narrow or (any(map(widens, nodes)) and sum(map(_bytes, new)) + LEAST_BYTES <= _bytes(root))
        if nodes and worth and not changed.intersection(map(shown_by, read)):
            added |= _copy_for_backward(joint.graph, ordered(joint.graph, nodes), shows[root], backward)
            held = rest | new
            sources |= {shown_by(node) for node in read}
    return added


def shown_by(node: fx.Node) -> fx.Node:
    """The node whose memory a node shows."""
    while is_single_view(node):
        node = node.all_input_nodes[0]
    return node


def narrows(node: fx.Node) -> bool:
    """Whether a node is a cast to a narrower floating-point dtype."""
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return bool(value.is_floating_point() and source.is_floating_point() and value.itemsize < source.itemsize)


def _computed_from(
    saved: Collection[fx.Node], stops: Callable[[fx.Node, fx.Node], bool], most: int
) -> tuple[set[fx.Node], set[fx.Node]] | None:
    """The nodes that compute these, and what they read; None if others than row-wise ones, or too many, are needed.

    Args:
        saved: nodes.
        stops: whether a node reads a source that is not computed again.
        most: the largest number of operators.
    """
    nodes, read, todo = set[fx.Node](), set[fx.Node](), list(saved)
    while todo:
        node = todo.pop()
        if node in nodes:
            continue
        if not is_row_wise(node):
            return None
        nodes.add(node)
        for source in node.all_input_nodes:
            if stops(node, source):
                read.add(source)
            else:
                todo.append(source)
    return (nodes, read) if sum(map(fusible, nodes)) <= most else None


def _copy_for_backward(
    graph: fx.Graph, nodes: Collection[fx.Node], saved: Collection[fx.Node], backward: Collection[fx.Node]
) -> set[fx.Node]:
    """Copies of nodes, which the backward reads in place of the saved ones."""
    readers = {user for node in saved for user in node.users if user in backward}
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(next(node for node in graph.nodes if node in readers)):
        for node in nodes:
            copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
    for node in saved:
        node.replace_all_uses_with(copies[node], lambda user: user in readers)
    return set(copies.values())


def widens(node: fx.Node) -> bool:
    """Whether an operator reads one floating-point tensor, and returns one of a wider dtype and of as many elements."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or len(node.all_input_nodes) != 1:
        return False
    source = node.all_input_nodes[0].meta.get("val")
    return (
        isinstance(source, Tensor)
        and source.is_floating_point()
        and value.is_floating_point()
        and source.itemsize < value.itemsize
        and source.numel() == value.numel()
    )


def _bytes(node: fx.Node) -> int:
    """Bytes of a node's tensors."""
    return sum(hint(value.numel()) * value.itemsize for value in values_of(node) if isinstance(value, Tensor))


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
    return _known(node) and on_one_device((*node.all_input_nodes, node))


def _known(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or target in _ROWS_AND_LAYOUT


def on_one_device(nodes: Collection[fx.Node]) -> bool:
    """Whether the values of nodes are strided real tensors, all on one device."""
    values = [value for one in nodes for value in values_of(one)]
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
