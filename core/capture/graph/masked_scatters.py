"""Masked scatters, rewritten so that the sizes of their gradients do not depend on values."""

from functools import partial
from math import prod

import torch
from torch import fx

from .nodes import inserted_call

aten = torch.ops.aten


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
