"""Operators with ``sparse=True``, whose gradients a pipeline does not support."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from ...errors import RequestError
from ..values.user_lines import line_of
from .nodes import arguments_by_name, module_of

RULE = "a pipeline supports only dense gradients; give sparse=False (sparse_grad=False), and use an optimizer for them"
"""The rule and the fix, for messages."""

_FLAGS = ("sparse", "sparse_grad")
"""Arguments of operators that ask for a sparse gradient of the first argument."""


def refuse_sparse_gradients(nodes: Iterable[fx.Node], values: Mapping[str, Any]) -> None:
    """Refuse operators that would give a sparse gradient.

    A stage's programs, messages and gradient sums are dense. A dense gradient in place of a sparse one would train
    differently, because optimizers skip rows that a sparse gradient does not contain.

    Args:
        nodes: calls of a captured graph.
        values: node name → its fake result; with ``requires_grad`` if a gradient flows.

    Raises:
        RequestError: an operator has a sparse gradient.
    """
    for node in nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and _is_sparse(node) and values[source.name].requires_grad:
            module = module_of(node)
            where = f"module '{module}'" if module else "the step"
            raise RequestError(f"{line_of(node)}: {where} asks {node.target} for sparse gradients: {RULE}")


def _is_sparse(node: fx.Node) -> bool:
    given = arguments_by_name(node.target, node.args, node.kwargs)
    return any(given.get(flag) for flag in _FLAGS)
