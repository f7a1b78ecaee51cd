"""Wide tensors that the backward computes again from narrow ones instead of saving them.

Under autocast a loss over a large vocabulary casts the bfloat16 logits to float32, and its backward reads the float32
log-softmax. Per microbatch that is twice what the same model cast by hand saves. The logits are saved instead::

    F            mm ─▶ logits ─▶ cast ─▶ log_softmax ─▶ loss
                       │ saved                │ not saved
    backward           ╰──▶ cast ─▶ log_softmax ─▶ gradient of the logits

It has the same bits, and takes one more pass over memory. A tensor is computed again if a widening operator and at most
one more that works element by element or along rows are between it and what is saved then, and if the saved bytes fall.
"""

from collections.abc import Collection

from torch import Tensor, fx

from ..fusible import fusible, is_row_wise, values_of
from ..joint_graph import JointGraph, ordered
from .narrow_casts import copy_for_backward, read_by_backward, shown_by

MOST = 2
"""Largest number of operators that are computed again for one tensor."""
LEAST_BYTES = 4096
"""Smaller savings are not worth an operator."""


def recompute_wide(
    joint: JointGraph, in_forward: Collection[fx.Node], shared: Collection[fx.Node], fixed: Collection[fx.Node]
) -> set[fx.Node]:
    """Change a joint graph so that its backward computes wide tensors again from narrow ones.

    Arguments and result as of `recompute_casts`.
    """
    backward, read_nodes = read_by_backward(joint, in_forward, shared)
    shows: dict[fx.Node, list[fx.Node]] = {}
    for node in read_nodes:
        if node not in joint.gradients.values():
            shows.setdefault(shown_by(node), []).append(node)
    held = set(shows).union(shared, fixed)
    changed = {joint.primals[i] for i in joint.mutations}
    sources: set[fx.Node] = set()
    added: set[fx.Node] = set()
    for root, saved in shows.items():
        if root not in in_forward or root in sources:
            continue
        found = _from_narrow(saved, held - {root})
        if found is None:
            continue
        nodes, read = found
        if changed.intersection(map(shown_by, read)):
            continue
        new = {shown_by(node) for node in read} - held
        if sum(map(_bytes, new)) + LEAST_BYTES <= _bytes(root):
            added |= copy_for_backward(joint.graph, ordered(joint.graph, nodes), saved, backward)
            held = held - {root} | new
            sources |= {shown_by(node) for node in read}
    return added


def _from_narrow(saved: list[fx.Node], held: Collection[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]] | None:
    """The nodes that compute these from held tensors and from inputs of widening operators, and what they read; None if
    no operator widens, or if others than row-wise ones, or too many, are needed."""
    nodes, read, widened = set[fx.Node](), set[fx.Node](), False
    todo = list(saved)
    while todo:
        node = todo.pop()
        if node in nodes:
            continue
        if not is_row_wise(node) or sum(map(fusible, nodes)) > MOST:
            return None
        nodes.add(node)
        wider = widens(node)
        widened |= wider
        for source in node.all_input_nodes:
            if wider or shown_by(source) in held:
                read.add(source)
            else:
                todo.append(source)
    return (nodes, read) if widened and sum(map(fusible, nodes)) <= MOST else None


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
    return sum(value.numel() * value.itemsize for value in values_of(node) if isinstance(value, Tensor))
