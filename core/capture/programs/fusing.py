"""Groups of operators that run as one function, which a compiler makes of them: the sections of a program (`sections`).

Calls of groups in generated programs are bound to functions when the programs are complete. Equal groups are compiled
once.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, fx

from ..graph.randomness import DRAWS_AT
from .accumulated_products import Product, add_wide_product

aten = torch.ops.aten


@frozen(eq=False)
class Fusion:
    """A group of operators that runs as one.

    Args:
        nodes: in order, with the views through which they read.
        inputs: nodes outside that it reads.
        outputs: its nodes that are read outside: no views, and none that share memory.
        sums: gradients of parameters that it adds to their sums: number for the program's sink, and the value.
        products: those of them that are products of two matrices.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    sums: tuple[tuple[int, fx.Node], ...] = ()
    products: tuple[Product, ...] = ()

    @property
    def all_input_nodes(self) -> tuple[fx.Node, ...]:
        """Its inputs, under the name that ``fx.Node`` has for them."""
        return self.inputs

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the gradients that it adds to their sums."""
        return tuple(number for number, _ in self.sums)

    @property
    def draws(self) -> list[fx.Node]:
        """Its random draws, whose ordinals are inputs of its graph."""
        return [node for node in self.nodes if node.target in DRAWS_AT]

    def detached(self) -> "Fusion":
        """The same group in a graph of its own: the program's graph may change when others are derived from it."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)

        def copied(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
            return tuple(copies[node] for node in nodes)

        return Fusion(
            copied(self.nodes), copied(self.inputs), copied(self.outputs),
            tuple((number, copies[node]) for number, node in self.sums),
            tuple(Product(each.number, copies[each.node], copied(each.flips)) for each in self.products),
        )  # fmt: skip

    def graph(self) -> fx.Graph:
        """The group as a separate graph, which returns its outputs in a tuple.

        Its inputs are those of the group, the sums, and the ordinals of its draws; each has an example's metadata.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()

        def given(name: str, value: Any) -> fx.Node:
            made = graph.placeholder(name)
            made.meta["val"] = value
            return made

        for number, node in enumerate(self.inputs):
            copies[node] = given(f"x{number}", node.meta["val"])
        totals = {n: given(f"total{i}", _dense(node.meta["val"])) for i, (n, node) in enumerate(self.sums)}
        ordinals = {node: given(f"ordinal{i}", torch.tensor(0)) for i, node in enumerate(self.draws)}
        added: dict[fx.Node, list[int]] = {}
        for number, node in self.sums:
            added.setdefault(node, []).append(number)
        of_products = {product.node: product for product in self.products}
        left_out = {flip for product in self.products for flip in product.flips}
        for node in self.nodes:
            if node in of_products:
                product = of_products[node]
                _add_product(graph, totals[product.number], product, copies)
            if node in of_products or node in left_out:
                continue
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = {}  # it is of another trace; a compiler computes its own
            if node in ordinals:
                copies[node].target = DRAWS_AT[node.target]
                copies[node].args = (*copies[node].args[:-1], ordinals[node])
            for number in added.get(node, ()):
                graph.call_function(aten.add_.Tensor, (totals[number], copies[node]))
        graph.output(tuple(copies[node] for node in self.outputs))
        return graph


def _dense(value: Tensor) -> Tensor:
    """A sum of gradients of this kind: it is contiguous."""
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _add_product(graph: fx.Graph, total: fx.Node, product: Product, copies: dict[fx.Node, fx.Node]) -> None:
    left, right = (copies[factor] for factor in product.node.args[:2])  # type: ignore[index]
    if product.transposed:
        left, right = (graph.call_function(aten.t.default, (factor,)) for factor in (right, left))
    function = add_wide_product if product.casts else aten.addmm_.default
    graph.call_function(function, (total, left, right))


@frozen(eq=False)
class Shown:
    """A view of a section's result that is read outside of the section.

    Args:
        node: the view.
        root: the result whose memory it has; it is contiguous.
    """

    node: fx.Node
    root: fx.Node

    @property
    def all_input_nodes(self) -> tuple[fx.Node, ...]:
        """Its inputs, under the name that ``fx.Node`` has for them."""
        return (self.root,)


Piece = fx.Node | Fusion | Shown

Call = Callable[[list[Any]], Sequence[Tensor]]
"""Takes the inputs of a group's graph in a list, which it may empty, and returns its outputs."""


def nodes_of(piece: Piece) -> Sequence[fx.Node]:
    """The nodes that a piece runs."""
    if isinstance(piece, Fusion):
        return piece.nodes
    return [piece.node] if isinstance(piece, Shown) else [piece]


@frozen
class Fusions:
    """The calls of groups in programs.

    Args:
        places: the global variables of a program, the name in them that the program calls, and the group.
    """

    places: list[tuple[dict[str, Any], str, Fusion]] = field(factory=list)

    def bind(self, call_of: Callable[[Fusion], Call], now: Collection[Any] | None = None) -> None:
        """Set the function of each group.

        Args:
            call_of: compiles a group.
            now: the programs whose groups are compiled now, and not when they are first called; None for all.
        """
        scopes = None if now is None else [program.__globals__ for program in now]
        for scope, name, fusion in self.places:
            if scopes is None or any(scope is one for one in scopes):
                scope[name] = call_of(fusion)
            else:
                scope[name] = _late(scope, name, fusion, call_of)


def _late(scope: dict[str, Any], name: str, fusion: Fusion, call_of: Callable[[Fusion], Call]) -> Call:
    def call(given: list[Any]) -> Sequence[Tensor]:
        scope[name] = found = call_of(fusion)
        return found(given)

    return call
