"""Operators that return their input itself, rewritten so that later traces keep the alias."""

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ..values.user_lines import line_of
from .nodes import root_of, written_arguments

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
    also lose that a tensor was detached in place.

    Args:
        graph: a captured graph; changed in place.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source: Any = node.args[0] if node.args else None
        if node.target in _DROPOUTS and (node.args[1] == 0 or not node.args[2]):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target is aten.detach_.default:
            node.target = aten.detach.default
            here = position[node]
            source.replace_all_uses_with(node, delete_user_cb=lambda user, here=here: position[user] > here)
