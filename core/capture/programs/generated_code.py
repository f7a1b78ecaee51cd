"""Generates a Python function from part of a graph; it calls operators and frees each tensor after its last use.

An error that an operator raises gets a note with the line of the user's that the operator was captured from.

Results get the strides that they were traced with. A program is traced over fake tensors, and the trace depends on
their strides: whether a reshape is a `view` or a copy, whether `contiguous` copies, which memory format a kernel
detects. Real kernels do not always return the strides of their fake versions: BatchNorm and convolutions of transposed
inputs do not, and with one row a tensor's stride along the rows is arbitrary. If they may differ, a program compares
them, and copies a result with other strides. So all later operators, in this stage and in others, get what they were
traced with.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...errors import PanpipeError
from ..graph.nodes import always_views
from ..graph.sizes import Sizes, equal, has_symbols
from ..regions.regions import region_needed
from ..values.user_lines import last_place, user_line
from .accumulated_products import Product, products_of
from .overwriting import overwriting
from .sections import Call, Fusion, Fusions, Piece, divided, nodes_of

aten = torch.ops.aten


class Sink(Protocol):
    """Receives results that a program does not return, each with its number, as soon as they are computed."""

    def add(self, number: int, value: Any) -> None:
        """Receive a value."""

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        """Receive the factors of a matrix product, which the sink computes."""

    def totals(self, numbers: tuple[int, ...]) -> Sequence[Tensor]:
        """The tensors to which a section then adds the values with these numbers; they are contiguous."""

    def added(self, numbers: tuple[int, ...]) -> None:
        """The section has added them."""


Program = Callable[[list[Any], Sink], list[Any]]
"""Takes its inputs in a list, which it empties so that nothing outlives its last use, and returns its outputs."""


class _NoSink:
    def add(self, number: int, value: Any) -> None:
        pass

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        pass

    def totals(self, numbers: tuple[int, ...]) -> Sequence[Tensor]:
        return ()

    def added(self, numbers: tuple[int, ...]) -> None:
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
        fusions: collects the sections, which run as one; None if each operator runs by itself.
    """
    names = {node: f"v{i}" for i, node in enumerate([*inputs, *nodes])}
    regions = [region for node in nodes if (region := region_needed(node)) is not None]
    scope: dict[str, Any] = {"restrided": restrided, "held": regions}
    kept = {*outputs, *for_sink}
    pieces: Sequence[Piece] = nodes if fusions is None else divided(nodes, outputs, for_sink)
    last = _last_uses(pieces, outputs)
    over = overwriting(nodes, kept, set(nodes).difference(pieces))
    found, by_themselves = products_of(for_sink, nodes, outputs), set(pieces)
    products = {each.node: each for each in found if by_themselves.issuperset(each.casts)}
    left_out = {flip for product in products.values() for flip in product.flips}
    sinks = _sink_calls(for_sink, pieces, names)
    lines, traces = _input_lines(inputs, last, sinks, names), dict[int, str]()
    for position, piece in enumerate(pieces):
        made: Sequence[fx.Node]
        begin = len(lines)
        if isinstance(piece, Fusion):
            assert fusions is not None
            alone = piece.detached()
            scope[f"g{position}"] = _run_in_parts(alone)  # until it is bound
            fusions.places.append((scope, f"g{position}", alone))
            made = piece.outputs
            lines += _group_call(f"g{position}", piece, names, scope, [n for n in piece.inputs if last[n] == position])
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
        left = made if isinstance(piece, Fusion) else (*piece.all_input_nodes, *made)
        lines += _deletion(left, position, last, names, scope)
        traces.update(dict.fromkeys(range(begin, len(lines)), _stack_trace(piece)))
    lines.append(f"    return [{', '.join('None' if node is None else names[node] for node in outputs)}]")
    scope["noted"] = partial(_noted, {_HEAD + number: trace for number, trace in traces.items() if trace})
    lines = ["def program(inputs, sink):", "  try:", *lines, *_TAIL]
    exec(compile("\n".join(lines), _FILE, "exec"), scope)
    program: Program = scope["program"]
    return program


def with_sizes(program: Program, sizes: Sizes) -> Program:
    """A generated function with numbers in place of symbolic sizes."""
    scope: dict[str, Any] = program.__globals__
    if "symbolic" not in scope:
        scope["symbolic"] = [name for name, value in scope.items() if has_symbols(value)]
    if not scope["symbolic"]:
        return program
    numbers = {name: sizes.of(scope[name]) for name in scope["symbolic"]}
    return FunctionType(program.__code__, {**scope, **numbers})


def _sink_calls(
    for_sink: Sequence[fx.Node], pieces: Sequence[Piece], names: dict[fx.Node, str]
) -> dict[fx.Node, list[str]]:
    """The lines that pass values to the sink; those that a section adds to their sums have none."""
    in_sections = {number for piece in pieces if isinstance(piece, Fusion) for number in piece.numbers}
    found: dict[fx.Node, list[str]] = {}
    for number, value in enumerate(for_sink):
        if number not in in_sections:
            found.setdefault(value, []).append(f"    sink.add({number}, {names[value]})")
    return found


def _input_lines(
    inputs: Sequence[fx.Node], last: dict[fx.Node, int], sinks: dict[fx.Node, list[str]], names: dict[fx.Node, str]
) -> list[str]:
    """The lines that name the inputs, pass those to the sink that it gets, and delete those that nothing reads."""
    if not inputs:
        return []
    lines = [f"    {', '.join(names[node] for node in inputs)}, = inputs", "    inputs.clear()"]
    lines += [line for node in inputs for line in sinks.get(node, ())]
    unused = [names[node] for node in inputs if node not in last]
    return [*lines, f"    del {', '.join(unused)}"] if unused else lines


_HEAD = 3
"""Number of a generated function's first line within its ``try``, whose exceptions cost no time without an error."""
_TAIL = ("  except Exception as error:", "    noted(error)", "    raise")


def section_in_parts(section: Fusion) -> Program:
    """The program of a section alone: its sink gets what the section adds to sums, by position among these."""
    return compile_program(section.nodes, section.inputs, section.outputs, {}, [value for _, value in section.sums])


def _run_in_parts(section: Fusion) -> Call:
    """A section without its sums, for measuring the memory that it holds."""
    program: Program | None = None

    def call(given: list[Any]) -> Sequence[Tensor]:
        nonlocal program
        program = program or section_in_parts(section)
        del given[len(section.inputs) :]
        return program(given, no_sink)

    return call


def _stack_trace(piece: Piece) -> str:
    """The stack trace with which the first node of a piece was captured; "" if none was recorded."""
    return next((trace for node in nodes_of(piece) if (trace := node.meta.get("stack_trace"))), "")


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


def _group_call(
    name: str, fusion: Fusion, names: dict[fx.Node, str], scope: dict[str, Any], done: Sequence[fx.Node]
) -> list[str]:
    """The call of a group. Its inputs are in a list alone, so that it can free those that are not read later.

    Args:
        done: the inputs that are not read later.
    """
    given = [names[node] for node in fusion.inputs]
    given += [_argument(torch.tensor(node.args[-1]), names, scope) for node in fusion.draws]
    numbers = _argument(fusion.numbers, names, scope)
    given[len(fusion.inputs) : len(fusion.inputs)] = [f"*sink.totals({numbers})"] if fusion.sums else []
    freed = [names[node] for node in done if names[node] not in scope]
    made = "".join(f"{names[node]}, " for node in fusion.outputs).rstrip()
    return [
        f"    given = [{', '.join(given)}]",
        *([f"    del {', '.join(freed)}"] if freed else []),
        f"    {made} = {name}(given)" if made else f"    {name}(given)",
        *([f"    sink.added({numbers})"] if fusion.sums else []),
    ]


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
    same = None if kept else _same_tensor(node)
    if same is not None:
        return names[same]
    if node.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    function = f"f{position}"
    target: Any = node.target if over is None else over[0]
    scope[function] = target._op if isinstance(target, torch._ops.OpOverload) else target
    return f"{function}({', '.join(arguments)})"


_VIEWS = {
    aten._unsafe_view.default, aten.alias.default, aten.detach.default, aten.expand.default, aten.slice.Tensor,
    aten.view.default,
}  # fmt: skip
"""Views that often return the whole tensor unchanged."""


def _same_tensor(node: fx.Node) -> fx.Node | None:
    """The input of a view that returns it unchanged, and can replace the view; None for other nodes."""
    source, value = node.args[0] if node.args else None, node.meta.get("val")
    if node.target not in _VIEWS or not isinstance(source, fx.Node) or not isinstance(value, Tensor):
        return None
    given = source.meta.get("val")
    return source if isinstance(given, Tensor) and equal(_layout(given), _layout(value)) else None


def _layout(tensor: Tensor) -> list[Any]:
    return [*tensor.shape, *tensor.stride(), tensor.storage_offset()]


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


Strides = tuple[int, ...]

_CONTIGUOUS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
"""Operators whose result is contiguous whatever the strides of their operands are."""


def strides_to_check(node: fx.Node) -> Strides | None:
    """The strides that a node's result must have, if its kernel may return others.

    Args:
        node: of a traced graph.

    Returns:
        The strides; None if the result is not a tensor, or always has them.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    if value.numel() == 0 or _by_definition(node, value) or not is_non_overlapping_and_dense_or_false(value):
        return None
    strides = value.stride()
    return None if free_unbacked_symbols(strides) else strides


def _by_definition(node: fx.Node, value: Tensor) -> bool:
    target = node.target
    if target is operator.getitem:
        source: Any = node.args[0]
        return always_views(source.target)
    if always_views(target) or target in _CONTIGUOUS:
        return True
    if torch.Tag.pointwise not in getattr(target, "tags", ()) and node.all_input_nodes:
        return False
    values = [value, *(source.meta.get("val") for source in node.all_input_nodes)]
    return all(isinstance(v, Tensor) and v.is_contiguous() for v in values)


def restrided(tensor: Tensor, strides: Strides) -> Tensor:
    """The tensor with other strides: a view if only dimensions of one element differ, otherwise a copy.

    Args:
        tensor: any.
        strides: of a dense tensor with its shape.
    """
    shape = tensor.shape
    if all(a == b or n == 1 for a, b, n in zip(tensor.stride(), strides, shape, strict=True)):
        return tensor.as_strided(shape, strides)
    copied = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor)
