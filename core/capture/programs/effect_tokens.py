"""Operators with a side effect, such as the error check of `torch.linalg.solve`: they return nothing and must run.

AOTAutograd orders them by *tokens*, empty tensors that are passed from one to the next. Programs run their operators in
the graph's order, so the tokens are removed and the operators called directly.
"""

import operator
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors
from torch._higher_order_ops.effects import with_effects

_TOKENS = tuple(
    getattr(descriptors, name)
    for name in ("ForwardTokenAOTInput", "BackwardTokenAOTInput", "ForwardTokenAOTOutput", "BackwardTokenAOTOutput")
)
_CHECKS = {torch.ops.aten._linalg_check_errors.default}


def is_token(meaning: Any) -> bool:
    """Whether an input or output of a joint graph is a token, by its descriptor."""
    return isinstance(meaning, _TOKENS)


def remove_tokens(graph: fx.Graph) -> None:
    """Call operators with a side effect directly, without tokens.

    Args:
        graph: a joint graph; changed in place. Placeholders of tokens are left without users.
    """
    for node in graph.find_nodes(op="call_function", target=with_effects):
        _token, target, *args = node.args
        with graph.inserting_before(node):
            call = graph.call_function(target, tuple(args), dict(node.kwargs))
        results = [(user.args[1], user) for user in node.users if user.target is operator.getitem]
        values: Any = node.meta.get("val") or ()
        call.meta = {**node.meta, "val": values[1] if len(values) == 2 else tuple(values[1:])}
        several = len(values) > 2
        for position, user in results:
            if position == 0:
                user.replace_all_uses_with(_token)
            elif several:
                user.args = (call, position - 1)
                continue
            else:
                user.replace_all_uses_with(call)
            graph.erase_node(user)
        graph.erase_node(node)


def forward_checks(graph: fx.Graph) -> set[fx.Node]:
    """Error checks of the forward: those that do not depend on an incoming gradient."""
    late: set[fx.Node] = set()
    for node in graph.nodes:
        meaning = node.meta.get("desc") if node.op == "placeholder" else None
        if isinstance(meaning, descriptors.TangentAOTInput) or any(source in late for source in node.all_input_nodes):
            late.add(node)
    return {node for node in graph.nodes if node.target in _CHECKS and node not in late}
