"""Groups of neighbouring operators that a compiler fuses: those between matrix products, attention and the like.

    order of a program       add  norm ─▶ mm     sum    gelu ─▶ mm
    groups                  ╰────1────╯         ╰1╯    ╰─2─╯
    what runs            [add norm sum]  mm  [gelu]  mm

A group is extended by the next operator as long as that does not depend on an operator that depends on the group.
Operators that do not depend on the group move before it, others after it. So a layer is divided at its products, in the
same way for every cut: equal groups are compiled once, and a compiled program holds, accumulates and frees the same
tensors as one that is not compiled. Views are free inside a group; a reader outside creates the view itself.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx

from ..graph.randomness import DRAWS_AT
from .accumulated_products import Product, add_wide_product
from .fusible import fusible, is_single_view, parts, values_of

aten = torch.ops.aten

LEAST = 2
"""Smallest number of operators in a group: a single operator is one kernel already."""


@frozen(eq=False)
class Fusion:
    """A group of operators that runs as one.

    Args:
        nodes: in order, with the views through which they read.
        inputs: nodes outside that it reads.
        outputs: its nodes that are read outside: no views, and none that share memory.
        sums: gradients of parameters that it adds to their sums: number for the program's sink, and the value.
        products: those of them that are products of two matrices.
        section: whether it is a section (`sections`), and not a group of operators between large kernels.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    sums: tuple[tuple[int, fx.Node], ...] = ()
    products: tuple[Product, ...] = ()
    section: bool = False

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
            tuple(Product(each.number, copies[each.node], copied(each.flips)) for each in self.products), self.section,
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


@define(eq=False)
class _Group:
    """A group that is being collected.

    Args:
        nodes: in it.
        before: operators and views that do not depend on it, in order; they run before it.
        after: the others; they run after it.
        waiting: those of ``after`` that are not views of the group's own nodes.
    """

    nodes: dict[fx.Node, None] = field(factory=dict)
    before: list[fx.Node] = field(factory=list)
    after: list[fx.Node] = field(factory=list)
    waiting: set[fx.Node] = field(factory=set)


def fused(nodes: Sequence[fx.Node], kept: Collection[fx.Node | None]) -> list[Piece]:
    """The pieces that a program runs: operators, and groups in place of theirs, in a valid order.

    Args:
        nodes: of the program, in order; views that are not read outside of groups are not in the result.
        kept: nodes that the program returns or passes to its sink.
    """
    inside = set(nodes)
    runs: list[list[fx.Node] | fx.Node] = []
    group = _Group()

    def close() -> None:
        nonlocal group
        runs.extend(group.before)
        work = [node for node in group.nodes if node not in skipped]
        runs.extend([list(group.nodes)] if len(work) >= LEAST else list(group.nodes))
        runs.extend(group.after)
        group = _Group()

    skipped: set[fx.Node] = set()  # parts of results, which come with their operator
    for node in nodes:
        if node in skipped:
            continue
        sources = [_root(source, inside) for source in node.all_input_nodes]
        waits = any(source in group.waiting for source in sources)
        if fusible(node):
            if waits or not _on_one_device(node, group):
                close()
            picked = [part for part in parts(node) if part in inside]
            skipped.update(picked)
            group.nodes.update(dict.fromkeys([node, *picked]))
        elif waits or any(source in group.nodes for source in sources):
            group.after.append(node)
            if waits or not is_single_view(node):
                group.waiting.add(node)
        else:
            group.before.append(node)
    close()
    return _pieces(runs, inside, kept)


def _on_one_device(node: fx.Node, group: _Group) -> bool:
    first = next(iter(group.nodes), node)
    return bool(values_of(first)[0].device == values_of(node)[0].device)


def _root(node: fx.Node, inside: Collection[fx.Node]) -> fx.Node:
    """The node of which a node is a view; views that other programs create are not followed."""
    while node in inside and is_single_view(node):
        node = node.all_input_nodes[0]
    return node


def _pieces(
    runs: Sequence[list[fx.Node] | fx.Node], inside: Collection[fx.Node], kept: Collection[fx.Node | None]
) -> list[Piece]:
    """Determine the inputs and outputs of groups, from the end of the program, where later reads are known."""
    read = {node for node in kept if node is not None}
    found: list[Piece] = []
    for run in reversed(runs):
        if isinstance(run, fx.Node):
            if run in read or not is_single_view(run):
                read.update(run.all_input_nodes)
                found.append(run)
            continue
        members = set(run)
        nodes, inputs = dict[fx.Node, None](), dict[fx.Node, None]()
        for node in run:
            for source in node.all_input_nodes:
                _add_source(source, members, inside, nodes, inputs)
            nodes[node] = None
        if outputs := tuple(node for node in run if node in read):
            found.append(Fusion(tuple(nodes), tuple(inputs), outputs))
            read.update(inputs)
    return found[::-1]


def _add_source(
    source: fx.Node,
    members: Collection[fx.Node],
    inside: Collection[fx.Node],
    nodes: dict[fx.Node, None],
    inputs: dict[fx.Node, None],
) -> None:
    """Add an input of a member to the group: as an input, or as views in the group and the input of these views."""
    if source in members or source in nodes:
        return
    if source in inside and is_single_view(source):
        _add_source(source.all_input_nodes[0], members, inside, nodes, inputs)
        nodes[source] = None
    else:
        inputs[source] = None


def nodes_of(piece: Piece) -> Sequence[fx.Node]:
    """The nodes that a piece runs."""
    if isinstance(piece, Fusion):
        return piece.nodes
    return [piece.node] if isinstance(piece, Shown) else [piece]


def running_order(nodes: Sequence[fx.Node], pieces: Sequence[Piece]) -> list[fx.Node]:
    """All nodes of a program, including removed nodes and those inside of groups, in an order in which they could run.

    Args:
        nodes: of the program.
        pieces: what runs.
    """
    order: dict[fx.Node, None] = {}
    inside = set(nodes)

    def put(node: fx.Node) -> None:
        if node in inside and node not in order:
            for source in node.all_input_nodes:
                put(source)
            order[node] = None

    for piece in pieces:
        for node in nodes_of(piece):
            put(node)
    for node in nodes:
        put(node)
    return list(order)
