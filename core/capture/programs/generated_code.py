"""Generates a Python function from part of a graph; it calls operators and frees each tensor after its last use.

An error that an operator raises gets a note with the line of the user's that the operator was captured from.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, fx

from ...errors import PanpipeError
from ..regions.regions import region_needed
from ..values.user_lines import last_place, user_line
from .accumulated_products import Product, products_of
from .bindings import binding_of, same_tensor
from .fusing import Fusion, Fusions, Piece, fused, running_order
from .layouts import restrided, strides_to_check
from .overwriting import overwriting


class Sink(Protocol):
    """Receives results that a program does not return, each with its number, as soon as they are computed."""

    def add(self, number: int, value: Any) -> None:
        """Receive a value."""

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        """Receive the factors of a matrix product, which the sink computes."""


Program = Callable[[list[Any], Sink], list[Any]]
"""Takes its inputs in a list, which it empties so that nothing outlives its last use, and returns its outputs."""


class _NoSink:
    def add(self, number: int, value: Any) -> None:
        pass

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        pass


_FILE = "<stage program>"
"""File name of the generated code."""

no_sink = _NoSink()
"""For programs without results for a sink, and for callers that do not need these."""


def compile_program(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node | None],
    modules: dict[str, Any],
    for_sink: Sequence[fx.Node] = (),
    fusions: Fusions | None = None,
) -> Program:
    """Generate the function of some nodes.

    Operators are bound to local names instead of being looked up, and a tensor's name is deleted after its last use,
    because the time between two operators and the held bytes matter in every step.

    Args:
        nodes: the nodes to run, in order.
        inputs: nodes whose values are arguments.
        outputs: nodes to return; None for an output without a node.
        modules: attribute name → module or constant tensor, for ``get_attr`` nodes.
        for_sink: nodes whose values are passed to the sink, each with its position, as soon as they are computed: a
            gradient is accumulated while it is in the cache, and its memory is reused for the next one.
        fusions: collects the groups of operators that run as one; None if each operator runs by itself.
    """
    names = {node: f"v{i}" for i, node in enumerate([*inputs, *nodes])}
    regions = [region for node in nodes if (region := region_needed(node)) is not None]
    scope: dict[str, Any] = {"restrided": restrided, "held": regions}
    kept = {*outputs, *for_sink}
    pieces: Sequence[Piece] = list(nodes) if fusions is None else fused(nodes, kept)
    last = _last_uses(pieces, outputs)
    over = overwriting(running_order(nodes, pieces), kept, set(nodes).difference(pieces))
    found, alone = products_of(for_sink, nodes, outputs), set(pieces)
    products = {each.node: each for each in found if alone.issuperset(each.casts)}
    left_out = {flip for product in products.values() for flip in product.flips}
    sinks: dict[fx.Node, list[str]] = {}
    for number, value in enumerate(for_sink):
        sinks.setdefault(value, []).append(f"    sink.add({number}, {names[value]})")
    lines, traces = list[str](), dict[int, str]()
    if inputs:
        lines += [f"    {', '.join(names[node] for node in inputs)}, = inputs", "    inputs.clear()"]
    lines += [line for node in inputs for line in sinks.get(node, ())]
    unused = [names[node] for node in inputs if node not in last]
    lines += [f"    del {', '.join(unused)}"] if unused else []
    for position, piece in enumerate(pieces):
        made: Sequence[fx.Node]
        begin = len(lines)
        if isinstance(piece, Fusion):
            assert fusions is not None
            fusions.add(scope, f"g{position}", piece)
            made = piece.outputs
            lines.append(_group_call(f"g{position}", piece, names))
        elif piece in left_out:
            continue
        elif piece.op == "get_attr":
            scope[names[piece]] = modules[str(piece.target)]
            continue
        elif piece in products:
            made = ()
            lines.append(_product_call(products[piece], names))
        else:
            made = (piece,)
            lines.append(f"    {names[piece]} = {_call(piece, position, names, scope, over.get(piece), piece in kept)}")
        lines += [line for node in made if node in last for line in _stride_check(node, names, scope)]
        lines += [line for node in made for line in sinks.get(node, ())]
        lines += _deletion([*piece.all_input_nodes, *made], position, last, names, scope)
        traces.update(dict.fromkeys(range(begin, len(lines)), _stack_trace(piece)))
    lines.append(f"    return [{', '.join('None' if node is None else names[node] for node in outputs)}]")
    scope["noted"] = partial(_noted, {_HEAD + number: trace for number, trace in traces.items() if trace})
    lines = ["def program(inputs, sink):", "  try:", *lines, *_TAIL]
    exec(compile("\n".join(lines), _FILE, "exec"), scope)
    program: Program = scope["program"]
    return program


_HEAD = 3
"""Number of a generated function's first line within its ``try``, whose exceptions cost no time without an error."""
_TAIL = ("  except Exception as error:", "    noted(error)", "    raise")


def _stack_trace(piece: Piece) -> str:
    """The stack trace with which the first node of a piece was captured; "" if none was recorded."""
    nodes: Sequence[fx.Node] = piece.nodes if isinstance(piece, Fusion) else (piece,)
    return next((trace for node in nodes if (trace := node.meta.get("stack_trace"))), "")


def _noted(traces: Mapping[int, str], error: Exception) -> None:
    """Note the line of the user's on an error: that of the operator, or one in Python code that the program calls.

    Args:
        traces: line of the generated function → stack trace of its operator.
        error: raised by the function; the first frame of its traceback is the function's.
    """
    frame = error.__traceback__
    line = user_line(error) or last_place(traces.get(frame.tb_lineno, "") if frame is not None else "")
    if line and not isinstance(error, PanpipeError):
        error.add_note(f"at {line}")


def _deletion(
    nodes: Sequence[fx.Node], position: int, last: dict[fx.Node, int], names: dict[fx.Node, str], scope: dict[str, Any]
) -> list[str]:
    """The line that deletes the names of nodes that are not read any more."""
    done = [names[n] for n in dict.fromkeys(nodes) if last.get(n, position) == position and names[n] not in scope]
    return [f"    del {', '.join(done)}"] if done else []


def _stride_check(node: fx.Node, names: dict[fx.Node, str], scope: dict[str, Any]) -> list[str]:
    """The line that gives a result the strides that it was traced with, if its kernel may return others."""
    strides = strides_to_check(node)
    if strides is None:
        return []
    name, wanted = names[node], _argument(strides, names, scope)
    return [f"    if {name}.stride() != {wanted}: {name} = restrided({name}, {wanted})"]


def _group_call(name: str, fusion: Fusion, names: dict[fx.Node, str]) -> str:
    made, given = ("".join(f"{names[n]}, " for n in of).rstrip() for of in (fusion.outputs, fusion.inputs))
    return f"    {made} = {name}({given})"


def _call(
    node: fx.Node,
    position: int,
    names: dict[fx.Node, str],
    scope: dict[str, Any],
    over: tuple[Any, str, fx.Node] | None,
    kept: bool,
) -> str:
    """The call of an operator.

    Args:
        over: if it overwrites an operand: the variant that writes to a given tensor, its argument, and the operand.
        kept: whether the program returns the result or passes it to its sink: then it must not be an input of the
            operator.
    """
    arguments = [_argument(value, names, scope) for value in node.args]
    arguments += [f"{key}={_argument(value, names, scope)}" for key, value in node.kwargs.items()]
    if over is not None:
        arguments.append(f"{over[1]}={names[over[2]]}")
    same = None if kept else same_tensor(node)
    if same is not None:
        return names[same]
    if node.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    function = f"f{position}"
    scope[function] = binding_of(node) if over is None else over[0]._op
    return f"{function}({', '.join(arguments)})"


def _product_call(product: Product, names: dict[fx.Node, str]) -> str:
    left, right = (names[factor] for factor in product.node.args[:2])  # type: ignore[index]
    if product.transposed:
        left, right = f"{right}.t()", f"{left}.t()"
    return f"    sink.add_product({product.number}, {left}, {right})"


def _last_uses(pieces: Sequence[Piece], outputs: Sequence[fx.Node | None]) -> dict[fx.Node, int]:
    last = {source: position for position, piece in enumerate(pieces) for source in piece.all_input_nodes}
    last.update({node: len(pieces) for node in outputs if node is not None})
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
