"""Rewrites of a captured graph that later traces and cuts need; each computes the same numbers.

- Operators that return their input itself keep the alias in later traces.
- Masked scatters get gradients whose sizes do not depend on values.
- Buffers that a step assigns a new tensor: earlier reads keep the old values.

In eager PyTorch an assignment gives the module a new tensor; tensors that were read before, and what autograd saved,
keep the old values. In a captured graph an assignment is a copy into the buffer at the end of the step. So the step
reads a clone, created before the first reader, and the copy is moved to where the new values are known. All nodes
between the two belong to one stage.
"""

from collections.abc import Collection
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx

from ..values.user_lines import line_of
from .nodes import inserted_call, root_of, written_arguments

aten = torch.ops.aten

_DROPOUTS = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}


def copy_written(graph: fx.Graph, names: Collection[str]) -> dict[str, str]:
    """Replace tensors of the batch that the step writes in place by copies, one for each microbatch.

    Args:
        graph: a captured graph; changed in place.
        names: of the batch's placeholders.

    Returns:
        Name of each placeholder that is written → the user's first line that writes it.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for argument in written_arguments(node):
            roots.setdefault(root_of(argument), node)
    lines = {root.name: line_of(node) for root, node in roots.items() if root.name in names}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for root in roots:
        if root.name in names:
            with graph.inserting_after(last[0]):
                copied = graph.call_function(aten.clone.default, (root,))
            copied.meta = dict(root.meta)
            root.replace_all_uses_with(copied, delete_user_cb=lambda user, copied=copied: user is not copied)  # type: ignore[misc]
    return lines


def rewrite_aliases(graph: fx.Graph) -> None:
    """Remove dropout that drops nothing, and have later readers of a tensor that is detached in place read the result.

    Such a dropout returns its input, so a write to one is a write to the other; tracing would copy it. Tracing would
    also lose that a tensor was detached in place. A tensor that is set to itself, as a parametrization does, is not
    written.

    Args:
        graph: a captured graph; changed in place.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source: Any = node.args[0] if node.args else None
        unchanged = node.target in _DROPOUTS and (node.args[1] == 0 or not node.args[2])
        if unchanged or (node.target is aten.set_.source_Tensor and source is node.args[1]):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target is aten.detach_.default:
            node.target = aten.detach.default
            here = position[node]
            source.replace_all_uses_with(node, delete_user_cb=lambda user, here=here: position[user] > here)


def rewrite_masked_scatters(graph: fx.Graph) -> None:
    """Replace every masked scatter by a choice between the old values and gathered new values.

    The gradient of a masked scatter selects by the mask, so its size is not known before it runs. Both forms only copy
    numbers and add zeros to gradients, so they are equal to the last bit.

    Args:
        graph: a captured graph; changed in place.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.masked_scatter.default:
            _rewrite(graph, node)


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    values, mask, source = node.args
    shape = list(node.meta["val"].shape)

    call = partial(inserted_call, graph, node)
    with graph.inserting_before(node):
        chosen = call(aten.expand.default, mask, shape)
        before = call(aten.cumsum.default, call(aten.reshape.default, chosen, [prod(shape)]), 0)
        position = call(aten.clamp.default, call(aten.sub.Tensor, before, 1), 0)
        picked = call(aten.index_select.default, call(aten.reshape.default, source, [-1]), 0, position)
        new = call(aten.where.self, chosen, call(aten.reshape.default, picked, shape), values)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def keep_read_values(graph: fx.Graph, assigned: Collection[str]) -> None:
    """Have a step read clones of the buffers that it assigns.

    Args:
        graph: a captured graph; changed in place.
        assigned: names of the placeholders of these buffers.
    """
    copies = {
        node.args[0]: node
        for node in graph.nodes
        if node.target is aten.copy_.default and isinstance(node.args[0], fx.Node) and node.args[0].name in assigned
    }  # the last one of each: the assignment
    for buffer, copy in copies.items():
        readers = [node for node in graph.nodes if node in buffer.users and node is not copy]
        if not readers:
            continue
        with graph.inserting_before(readers[0]):
            clone = graph.call_function(aten.clone.default, (buffer,))
        clone.meta = {**readers[0].meta, "val": buffer.meta["val"]}
        for reader in readers:
            reader.replace_input_with(buffer, clone)
    for copy in copies.values():
        _move_up(graph, copy)


def _move_up(graph: fx.Graph, copy: fx.Node) -> None:
    """Move a copy to the first position at which the values that it copies are final."""
    buffer, value = copy.all_input_nodes
    moved = [value, copy] if value.target is aten.detach.default and list(value.users) == [copy] else [copy]
    position = {node: i for i, node in enumerate(graph.nodes)}
    root = root_of(value)
    waits_for = [n for n in graph.nodes if n is not copy and any(root_of(a) is root for a in written_arguments(n))]
    waits_for += [n for one in moved for n in one.all_input_nodes if n not in moved]
    waits_for += [reader for reader in buffer.users if reader is not copy]
    last = max(waits_for, key=lambda node: position[node])
    for node in moved if last.op != "placeholder" else ():
        last.append(node)
        last = node
