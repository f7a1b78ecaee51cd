"""Properties of the nodes of a captured graph: arguments that they write, storages of their results, their module,
which depend on fixed inputs alone; and the alignment of two sequences, such as the nodes of two captures."""

import operator
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, fx

from ..values.nesting import tensors_of

_NORM_WITH_STATISTICS = {
    torch.ops.aten.batch_norm.default: (3, 4, 5),
    torch.ops.aten.instance_norm.default: (3, 4, 5),
}
"""Composite normalisations write running statistics that their schema does not mark: (mean, variance, training)."""


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments that an operator writes in place."""
    if node.op != "call_function":
        return []
    found: list[Any] = []
    if node.target in _NORM_WITH_STATISTICS:
        *positions, flag = _NORM_WITH_STATISTICS[node.target]
        if node.args[flag]:
            found += [node.args[p] for p in positions if isinstance(node.args[p], fx.Node)]
    for value in written_values(node.target, node.args, node.kwargs):
        found += [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, fx.Node)]
    return found


def written_roots(nodes: Iterable[fx.Node]) -> set[str]:
    """Names of the nodes whose storages some nodes write in place."""
    return {root_of(argument).name for node in nodes for argument in written_arguments(node)}


def is_view(node: fx.Node) -> bool:
    """Whether an operator's result is a view of its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.arguments or not node.args:
        return False
    if node.target in _MAYBE_VIEWS:
        return True
    info = schema.arguments[0].alias_info
    return info is not None and not info.is_write and isinstance(node.args[0], fx.Node)


def always_views(target: Any) -> bool:
    """Whether an operator always returns a view of its input."""
    if target is torch.ops.aten._unsafe_view.default:
        return True  # its schema does not declare it
    return isinstance(target, torch._ops.OpOverload) and any(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in target._schema.returns
    )


_MAYBE_VIEWS = {torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default, torch.ops.aten.flatten.using_ints}


def note_roots(graph: fx.Graph, values: Mapping[str, Any]) -> None:
    """Note at every node which node's storage it shares, from the storages of a run's results.

    A schema does not always declare it: dropout that drops nothing returns its input, and so may users' functions.

    Args:
        graph: a captured graph.
        values: node name → its fake result; all of one run.
    """
    first: dict[int, fx.Node] = {}
    for node in graph.nodes:
        value = values.get(node.name)
        many = isinstance(value, tuple | list)
        for tensor in value if many else [value]:  # type: ignore[union-attr]
            if isinstance(tensor, torch.Tensor):
                root = first.setdefault(tensor.untyped_storage()._cdata, node)
                if not many:
                    node.meta[_ROOT] = root


_ROOT = "shows"

WITH_PREVIOUS = "with_previous"
"""Key of ``meta`` of a node that must be in the same stage as the node before it."""


def root_of(node: fx.Node) -> fx.Node:
    """The node whose storage a node shares; the node itself if its storage is its own."""
    if _ROOT in node.meta:
        root: fx.Node = node.meta[_ROOT]
        return root
    while node.op == "call_function" and (node.target is operator.getitem or is_view(node)):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    schema = getattr(node.target, "_schema", None)
    returned = schema.returns[0].alias_info if schema is not None and schema.returns else None
    if returned is not None and returned.is_write and (written := written_arguments(node)):
        return root_of(written[0])
    return node


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything that they depend on, without placeholders."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def inserted_call(graph: fx.Graph, like: fx.Node, target: Any, *arguments: Any) -> fx.Node:
    """A call at the graph's insertion point, with the ``meta`` of another node except for its value."""
    made = graph.call_function(target, arguments)
    made.meta = {key: value for key, value in like.meta.items() if key != "val"}
    return made


def module_of(node: fx.Node) -> str:
    """Name of the innermost module that a node of a captured graph comes from; "" for the model itself and the step."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("model").removeprefix(".") if stack else ""


def arguments_by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with defaults; those given by keyword alone if the target has no schema.

    Args:
        target: the overload that is called, or a Python function.
        args, kwargs: tensors, or nodes of a graph.
    """
    schema = getattr(target, "_schema", None)
    parameters = schema.arguments if schema is not None else ()
    named = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    return {**named, **dict(zip((parameter.name for parameter in parameters), args, strict=False)), **kwargs}


def written_values(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes in place, by its schema; an argument may be a list.

    Args:
        target, args, kwargs: as of `arguments_by_name`.
    """
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [
        args[position] if position < len(args) else kwargs.get(parameter.name)
        for position, parameter in enumerate(schema.arguments)
        if parameter.alias_info is not None and parameter.alias_info.is_write
    ]


def written_tensors(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes in place; arguments as of `arguments_by_name`."""
    return tensors_of(written_values(target, args, kwargs))


def aligned(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pairs of positions, in the old and in the new sequence, of equal elements, as a diff finds them; ascending."""
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    return [(a + i, b + i) for a, b, size in matcher.get_matching_blocks() for i in range(size)]


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
