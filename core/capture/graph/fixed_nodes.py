"""Finds the nodes that depend on fixed inputs alone: parameters, constants, and buffers that nothing writes."""

import operator
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, fx

_NAMESPACES = {"aten", "prims"}
"""Namespaces of operators whose schema says what they read and write; others may have a state."""


def fixed_nodes(
    graph: fx.Graph,
    inputs: Mapping[fx.Node, Any],
    parameters: Container[fx.Node],
    value_of: Callable[[fx.Node], Any] = lambda node: node.meta.get("val"),
) -> dict[fx.Node, bool]:
    """The nodes that depend on fixed inputs alone, in order; for each whether it depends on a parameter.

    Random draws, operators that write in place, and operators that are not torch's are not among them.

    Args:
        graph: a captured or traced graph.
        inputs: its fixed inputs.
        parameters: those that are parameters.
        value_of: the fake result of a node.
    """
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if _is_pure(node, value_of) and all(source in found or source in inputs for source in sources):
            found[node] = any(found.get(source, source in parameters) for source in sources)
    return found


def _is_pure(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> bool:
    """Whether a node computes tensors from its arguments alone, the same ones in every run."""
    target: Any = node.target
    if node.op != "call_function" or not _are_strided(value_of(node)):
        return False
    if target is operator.getitem:
        return True
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in _NAMESPACES
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _are_strided(value: Any) -> bool:
    values = [v for v in value if v is not None] if isinstance(value, list | tuple) else [value]
    return all(isinstance(v, Tensor) and v.layout is torch.strided for v in values)
