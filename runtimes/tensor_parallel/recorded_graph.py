"""Rewrites the recorded program of a tensor rank: removes views without effect, and replaces functional collectives."""

from typing import Any

import torch
from torch import fx

from ...core.capture.graph.tensor_collectives import ALL_GATHER, ALL_REDUCE, MAX, REDUCE_SCATTER, SUM
from ...core.errors import RequestError


def drop_views(graph: fx.Graph) -> None:
    """Remove views of the same shape: DTensor takes one of each parameter at the start, which is no work there."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.view.default and node.meta["val"].shape == node.args[0].meta["val"].shape:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def replace_collectives(graph: fx.Graph) -> None:
    """Replace functional collectives by panpipe's.

    Raises:
        RequestError: the program communicates in another way.
    """
    for node in list(graph.nodes):
        target = node.target
        if not (isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional"):
            continue
        name = target._schema.name.split("::")[-1]
        if name == "wait_tensor":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif name == "all_reduce" and (node.args[1] == SUM or (node.args[1] == MAX and _before_softmax(node))):
            node.target, node.args = ALL_REDUCE, node.args[:2]
        elif name == "all_gather_into_tensor":
            node.target, node.args = ALL_GATHER, node.args[:2]
        elif name == "reduce_scatter_tensor" and node.args[1] == SUM:
            node.target, node.args = REDUCE_SCATTER, (node.args[0], node.args[2])
        else:
            of = f" of '{node.args[1]}'" if len(node.args) > 1 and isinstance(node.args[1], str) else ""
            raise RequestError(
                f"the model's layouts need {name}{of} between tensor ranks: sums, all-gathers and reduce-scatters of "
                "sums are supported; use layouts of ColwiseParallel, RowwiseParallel and SequenceParallel"
            )


def _before_softmax(node: fx.Node) -> bool:
    """Whether a maximum is only subtracted before a logarithm of a softmax, which does not depend on it."""
    aten = torch.ops.aten
    users = [user for wait in node.users for user in wait.users]
    if [user.target for user in users] != [aten.sub.Tensor] or users[0].args[1] not in node.users:
        return False
    shifted = users[0]
    others = sorted(shifted.users, key=lambda user: user.target is not aten.exp.default)
    if [user.target for user in others] != [aten.exp.default, aten.sub.Tensor] or others[1].args[0] is not shifted:
        return False
    chain: Any = others[1].args[1]
    for expected in (aten.log.default, None, None, aten.sum.dim_IntList, aten.exp.default):
        if expected is not None and chain.target is not expected:
            return False
        chain = chain.args[0]
    return chain is shifted
