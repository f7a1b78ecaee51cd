"""Turns a part of a graph into a Python function that calls operators and drops each tensor after its last use."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .layouts import function_of

Sink = Callable[[int, Any], None]
"""Takes a result that a program does not return, with its number, as soon as it is there."""

Program = Callable[[list[Any], Sink], list[Any]]
"""Takes its inputs in a list, which it empties so that nothing outlives its last use, and returns its outputs."""


def no_sink(number: int, value: Any) -> None:
    """For programs that hand nothing over while they run, and for callers who do not want it."""


def compile_program(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node | None],
    modules: dict[str, Any],
    handed_over: Sequence[fx.Node] = (),
) -> Program:
    """Generate the function of some nodes.

    Operators are bound by name instead of looked up, and a tensor's name is deleted behind its last use: the time
    between two operators and the bytes held are what a training step is made of.

    Args:
        nodes: what to run, in order.
        inputs: nodes whose values are handed in.
        outputs: nodes to return; None where there is none.
        modules: attribute name → module, for ``get_attr`` nodes.
        handed_over: nodes whose values go to the sink, each by its position, where they are computed: a gradient is
            added up while it is still in the cache, and its memory serves the next one.
    """
    names = {node: f"v{i}" for i, node in enumerate([*inputs, *nodes])}
    scope: dict[str, Any] = {}
    last = _last_uses(nodes, outputs)
    lines = ["def program(inputs, sink):"]
    sinks: dict[fx.Node, list[str]] = {}
    for number, node in enumerate(handed_over):
        sinks.setdefault(node, []).append(f"    sink({number}, {names[node]})")
    if inputs:
        lines += [f"    {', '.join(names[node] for node in inputs)}, = inputs", "    inputs.clear()"]
    lines += [line for node in inputs for line in sinks.get(node, ())]
    unused = [names[node] for node in inputs if node not in last]
    lines += [f"    del {', '.join(unused)}"] if unused else []
    for position, node in enumerate(nodes):
        if node.op == "get_attr":
            scope[names[node]] = modules[str(node.target)]
            continue
        function = f"f{position}"
        scope[function] = function_of(node.target)
        arguments = [_argument(value, names, scope) for value in node.args]
        arguments += [f"{key}={_argument(value, names, scope)}" for key, value in node.kwargs.items()]
        lines.append(f"    {names[node]} = {function}({', '.join(arguments)})")
        lines += sinks.get(node, ())
        done = [names[n] for n in dict.fromkeys([*node.all_input_nodes, node]) if last.get(n, position) == position]
        done = [name for name in done if name not in scope]
        if done:
            lines.append(f"    del {', '.join(done)}")
    lines.append(f"    return [{', '.join('None' if node is None else names[node] for node in outputs)}]")
    exec(compile("\n".join(lines), "<stage program>", "exec"), scope)
    program: Program = scope["program"]
    return program


def _last_uses(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node | None]) -> dict[fx.Node, int]:
    last = {source: position for position, node in enumerate(nodes) for source in node.all_input_nodes}
    last.update({node: len(nodes) for node in outputs if node is not None})
    return last


def _argument(value: Any, names: dict[fx.Node, str], scope: dict[str, Any]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple) and any(isinstance(v, fx.Node | list | tuple) for v in value):
        inner = ", ".join(_argument(v, names, scope) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
    constant = f"c{len(scope)}"
    scope[constant] = value
    return constant
