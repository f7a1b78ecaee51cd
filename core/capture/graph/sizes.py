"""Symbolic sizes: graphs in which some sizes of the batch are symbols, and their values for one batch.

A step that is captured with symbols (`torch.export` with ``Dim.AUTO``) is traced once for all sizes. Operators get
sizes as `torch.SymInt` arguments, which are expressions of the symbols; everything that is derived from the graph keeps
them. What torch or this package decided by comparing sizes is a guard of the graph's shape environment.
`SizeSymbols.values` checks the guards for the sizes of a batch, and `Sizes.of` replaces expressions by numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from attrs import define, field, frozen
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._C import _get_dispatch_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    free_unbacked_symbols,
    guarding_hint_or_throw,
    statically_known_true,
)
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

_KINDS: dict[type, type] = {SymInt: int, SymFloat: float, SymBool: bool}
NUMBERS = tuple(_KINDS)


class NotSymbolic(Exception):
    """The step cannot be captured with symbolic sizes."""


def fold_sizes(graph: fx.Graph) -> None:
    """Replace nodes that compute symbolic sizes by the sizes themselves, as arguments of the operators that read them.

    Args:
        graph: changed in place.

    Raises:
        NotSymbolic: the graph returns a symbolic size.
    """
    sizes: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, NUMBERS) and node.op == "call_function" and not free_unbacked_symbols(value):
            sizes[node] = value
        elif node.op != "placeholder" and not sizes.keys().isdisjoint(node.all_input_nodes):
            if node.op == "output":
                raise NotSymbolic("it returns a size")
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda source: sizes.get(source, source))
    for node in reversed(sizes):
        graph.erase_node(node)


def hint(size: Any) -> int:
    """A size for the example that the graph was captured with. Nothing may depend on it that is wrong for others."""
    return size if type(size) is int else guarding_hint_or_throw(size)


def equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether shapes or strides are equal for all values of the symbols."""
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def has_symbols(value: Any) -> bool:
    """Whether an argument has a symbolic number."""
    if isinstance(value, tuple | list):
        return any(map(has_symbols, value))
    return isinstance(value, NUMBERS)


def computed(symbols: Mapping[sympy.Symbol, Any], expression: Any) -> Any:
    """The value of an expression, as Python computes it."""
    return sympy_interp(PythonReferenceAnalysis, dict(symbols), expression)


def number(symbols: Mapping[sympy.Symbol, Any], value: Any) -> Any:
    """A symbolic number, computed from other values of the symbols."""
    return computed(symbols, value.node.expr)


_PROXY = torch._C._TorchDispatchModeKey.PROXY
_BINARY = ("add", "sub", "mul", "mod", "int_floordiv", "eq", "ne", "gt", "lt", "le", "ge", "sym_max", "sym_min")
"""Methods of `torch.fx.experimental.sym_node.SymNode` for two operands."""


@contextmanager
def computed_once() -> Iterator[None]:
    """Within this context torch computes each expression of sizes once: a quarter of the time of a symbolic capture.

    Every fake tensor is asked for its number of elements and its layout, so the same few expressions are computed a
    hundred thousand times. The results are kept with the shape environment.
    """
    with ExitStack() as stack:
        for name in _BINARY:
            stack.enter_context(mock.patch.object(SymNode, name, _binary(name, getattr(SymNode, name))))
        stack.enter_context(mock.patch.object(SymNode, "wrap_int", _wrap_int(SymNode.wrap_int)))
        yield


def _results(env: ShapeEnv) -> dict[Any, SymNode]:
    found: dict[Any, SymNode] = vars(env).setdefault("panpipe_results", {})
    return found


def _binary(name: str, original: Callable[[SymNode, SymNode], SymNode]) -> Callable[[SymNode, SymNode], SymNode]:
    def method(self: SymNode, other: SymNode) -> SymNode:
        if self.shape_env is None or self._hint is None or other._hint is None:  # of values, which may be found later
            return original(self, other)
        results, key = _results(self.shape_env), (name, self._expr, self.pytype, other._expr, other.pytype)
        found = results.get(key)
        if found is not None:
            mode: Any = _get_dispatch_mode(_PROXY) or get_proxy_mode()  # the first is a fraction of the second's time
            if mode is None or found in mode.tracer.symnode_tracker.sym_node_dict:
                return found  # a trace knows where it comes from
        made = original(self, other)
        return results.setdefault(key, made) if found is None else made

    return method


def _wrap_int(original: Callable[[SymNode, int], SymNode]) -> Callable[[SymNode, int], SymNode]:
    def method(self: SymNode, number: int) -> SymNode:
        if self.shape_env is None:
            return original(self, number)
        results = _results(self.shape_env)
        if number not in results:
            results[number] = original(self, number)
        return results[number]

    return method


@define
class Sizes:
    """Values of symbols.

    Args:
        symbols: the values.
    """

    symbols: Mapping[sympy.Symbol, int]
    _known: dict[Any, Any] = field(factory=dict)

    def of(self, value: Any) -> Any:
        """An argument with numbers in place of symbolic ones."""
        if isinstance(value, tuple | list):
            return type(value)(map(self.of, value)) if has_symbols(value) else value
        kind = _KINDS.get(type(value))
        return value if kind is None else kind(self.value(value.node.expr))

    def value(self, expression: Any) -> Any:
        """The value of an expression."""
        found = self._known.get(expression)
        if found is None:
            found = self._known[expression] = computed(self.symbols, expression)
        return found

    def tensor(self, value: Tensor) -> Tensor:
        """A tensor without values like a fake one."""
        return torch.empty(self.of(tuple(value.shape)), dtype=value.dtype, device="meta")

    def graph(self, graph: fx.Graph) -> fx.Graph:
        """A copy of a graph with numbers in place of symbolic sizes, also in the fake results of its nodes.

        Args:
            graph: of one fake mode, which is active.
        """
        made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in graph.nodes:
            arguments = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            args, kwargs = pytree.tree_map_only(NUMBERS, self.of, arguments)
            new = copies[node] = made.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            new.meta = {key: copies[v] if isinstance(v, fx.Node) else v for key, v in node.meta.items()}
            if "val" in new.meta:
                new.meta["val"] = pytree.tree_map_only((Tensor, *NUMBERS), self.fake, node.meta["val"])
        return made

    def fake(self, value: Any) -> Any:
        """A fake tensor of the active mode with numbers in place of symbolic sizes; or a number."""
        if not isinstance(value, Tensor):
            return self.of(value)
        shape, stride = tuple(value.shape), tuple(value.stride())
        if not has_symbols((shape, stride)):
            return value
        made = torch.empty_strided(self.of(shape), self.of(stride), dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad)


@frozen
class SizeSymbols:
    """The symbols of a captured graph.

    Args:
        env: the graph's shape environment.
        shapes: position of each tensor among the batch's leaves → its shape, partly symbolic.
        reads: for each value that the step's Python read: whether other sizes give the same, see `KnownValues`.
    """

    env: ShapeEnv
    shapes: Mapping[int, Sequence[Any]]
    reads: Sequence[Callable[[Callable[[Any], Any]], bool]] = ()
    _known_guards: dict[int, list[Any]] = field(factory=dict, eq=False)

    @property
    def free(self) -> list[SymInt]:
        """The symbols that sizes depend on."""
        expressions = [size.node.expr for shape in self.shapes.values() for size in shape if isinstance(size, SymInt)]
        names = sorted({symbol for each in expressions for symbol in each.free_symbols}, key=str)
        return [self.env.create_symintnode(each, hint=int(self.env.backed_var_to_val[each])) for each in names]  # type: ignore[misc]

    def values(self, shapes: Mapping[int, Sequence[int]]) -> Sizes | None:
        """The values of the symbols for a batch; None if the graph is not valid for it.

        Args:
            shapes: position of each tensor among the batch's leaves → its shape, with as many dimensions as captured.
        """
        pairs = [pair for leaf, mine in self.shapes.items() for pair in zip(mine, shapes[leaf], strict=True)]
        if any(own != size for size, own in pairs if type(size) is int):
            return None
        symbolic = [(size.node.expr, own) for size, own in pairs if type(size) is not int]
        sizes = Sizes({expression: own for expression, own in symbolic if expression.is_Symbol})
        if not all(sizes.symbols.keys() >= expression.free_symbols for expression in self._expressions):
            return None
        allowed = self.env.var_to_range
        valid = (
            all(max(2, allowed[symbol].lower) <= own <= allowed[symbol].upper for symbol, own in sizes.symbols.items())
            and all(sizes.value(expression) == own for expression, own in symbolic)
            and all(map(sizes.value, self._guards))
            and all(same(sizes.of) for same in self.reads)
        )
        return sizes if valid else None

    @property
    def of_parts(self) -> bool:
        """Whether parts of dimensions may have size 1, see `symbolic_sizes`."""
        return bool(self.env.size_like)

    @property
    def fixed(self) -> bool:
        """Whether what was derived from the graph fixes all sizes, such as a loop over a sequence."""
        return not self.free

    @property
    def _guards(self) -> list[Any]:
        """The conditions of the graph and of everything that has been derived from it."""
        count = len(self.env.guards)
        if count not in self._known_guards:
            self._known_guards.clear()
            self._known_guards[count] = list({self.env.replace(guard.expr): None for guard in self.env.guards})
        return self._known_guards[count]

    @property
    def _expressions(self) -> list[Any]:
        sizes = [size.node.expr for shape in self.shapes.values() for size in shape if isinstance(size, SymInt)]
        return [*sizes, *self._guards]
