"""Sections of a program: whole layers, each of which a compiler turns into one function.

::

    nodes of B     loss │ norm mm gelu mm add │ norm mm gelu mm add │ norm mm gelu mm add │ embedding
    sections       ╰─1─╯ ╰─────── 2 ─────────╯ ╰─────── 2 ─────────╯ ╰─────── 2 ─────────╯ ╰── 3 ──╯

A section contains its layer's products, attention, norms and random draws, and adds its gradients of parameters to
their sums itself: so they are never all in memory at once, and Python calls one function for a layer. Layers are found
as repetitions in the list of operators; a section begins where the fewest tensors are read across the cut. Equal layers
are thus equal sections, which are compiled once. Ordinals of random draws are inputs of a section, so that layers with
dropout are equal, too. Calls of sections in generated programs are bound to functions when the programs are complete.

Regions (code that remains Python), collectives, and operators with complex or sparse tensors are in no section: they
run between two. A view of a section's result that is read outside of the section runs there, as an operator.
"""

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, fx

from ..graph.nodes import always_views
from ..graph.randomness import DRAWS_AT
from .accumulated_products import Product, add_wide_product, products_of
from .recomputed import on_one_device, parts, values_of


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


Piece = fx.Node | Fusion

Call = Callable[[list[Any]], Sequence[Tensor]]
"""Takes the inputs of a group's graph in a list, which it may empty, and returns its outputs."""


def nodes_of(piece: Piece) -> Sequence[fx.Node]:
    """The nodes that a piece runs."""
    return piece.nodes if isinstance(piece, Fusion) else [piece]


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


LEAST = 2
"""Smallest number of operators that compute something in a section."""

_SHORTEST, _LONGEST = 4, 400
"""Numbers of nodes: of a repetition that is a section, and of a section that is no repetition. Compiling 400 takes
Inductor about a minute."""

_UNKNOWN_SIZE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def divided(
    nodes: Sequence[fx.Node], kept: Collection[fx.Node | None], for_sink: Sequence[fx.Node] = ()
) -> list[Piece]:
    """The pieces that a program runs: sections, and the operators that are in none, in the order of the program.

    Args:
        nodes: of the program, in order.
        kept: nodes that the program returns.
        for_sink: gradients of parameters, by number.
    """
    nodes = _with_parts(nodes)
    runs: list[list[fx.Node] | fx.Node] = []
    labels = _labels(nodes, {*kept, *for_sink})
    crossing = _crossings(nodes)
    begin = 0
    for position in range(len(nodes) + 1):
        if position < len(nodes) and compilable(nodes[position]):
            continue
        for low, high in _cut(labels, crossing, begin, position):
            run = list(nodes[low:high])
            if sum(_computes(node) for node in run) >= LEAST:
                runs.append(run)
            else:
                runs.extend(run)
        runs.extend(nodes[position : position + 1])
        begin = position + 1
    return _pieces(runs, nodes, kept, for_sink)


def compilable(node: fx.Node) -> bool:
    """Whether a node may be in a section."""
    target = node.target
    if node.op != "call_function":
        return False
    if target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and compilable(source)
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    inputs = node.all_input_nodes
    if target in DRAWS_AT:
        inputs = [source for source in inputs if source is not node.args[-2]]  # the random key is on the host
    elif target.namespace != "aten" or not _UNKNOWN_SIZE.isdisjoint(target.tags):
        return False
    return on_one_device((*inputs, node))


def _with_parts(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes with those that select one of several results directly after the operator that returns these."""
    inside, found = set(nodes), dict[fx.Node, None]()
    for node in nodes:
        if node not in found:
            found[node] = None
            found |= dict.fromkeys(part for part in parts(node) if part in inside)
    return list(found)


def _computes(node: fx.Node) -> bool:
    return not _is_view(node) and node.target is not operator.getitem


def _is_view(node: fx.Node) -> bool:
    """Whether a node shares the memory of its first argument, by its operator: a view, or one of several views."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and always_views(source.target)
    return always_views(node.target) and len(node.all_input_nodes) == 1


def _labels(nodes: Sequence[fx.Node], kept: Collection[fx.Node | None]) -> list[int]:
    """For each node a number that is equal for equal operators on tensors of equal layout."""
    known: dict[str, int] = {}
    found = []
    for node in nodes:
        args = node.args[:-1] if node.target in DRAWS_AT else node.args
        given = fx.map_arg((args, node.kwargs), lambda source: None)
        values = [(v.shape, v.dtype) for v in values_of(node) if isinstance(v, Tensor)]
        found.append(known.setdefault(str((node.target, given, values, node in kept)), len(known)))
    return found


def _crossings(nodes: Sequence[fx.Node]) -> list[int]:
    """For each position, how many tensors are computed before it and read at it or after it; many within an operator
    and what selects its results."""
    place = {node: position for position, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            root = _root(source, place)
            if root in place:
                last[root] = place[node]
    change = [0] * (len(nodes) + 2)
    for root, end in last.items():
        change[place[root] + 1] += 1
        change[end + 1] -= 1
    found: list[int] = np.cumsum(change).tolist()
    return [
        count + len(nodes) * (node.target is operator.getitem) for count, node in zip(found, nodes, strict=False)
    ] + found[len(nodes) :]


def _cut(labels: Sequence[int], crossing: Sequence[int], low: int, high: int) -> list[tuple[int, int]]:
    """Divide a range of nodes into sections: repetitions first, then what is between them."""
    if high <= low:
        return []
    found = repetition(np.asarray(labels[low:high]))
    if found is None:
        if high - low <= _LONGEST:
            return [(low, high)]
        quarter = (high - low) // 4
        middle = min(range(low + quarter, high - quarter), key=lambda i: (crossing[i], abs(2 * i - low - high)))
        return _cut(labels, crossing, low, middle) + _cut(labels, crossing, middle, high)
    period, start, end = found[0], low + found[1], low + found[2]
    # Where few tensors cross; a later cut than those that divide off the most repetitions must save two more.
    spare = (end - start) % period
    first = min(range(start, start + period), key=lambda i: (crossing[i] + 2 * (i > start + spare), i))
    bounds = list(range(first, end + 1, period))
    inner = list(itertools.pairwise(bounds))
    return _cut(labels, crossing, low, first) + inner + _cut(labels, crossing, bounds[-1], high)


def repetition(labels: "np.ndarray[Any, Any]") -> tuple[int, int, int] | None:
    """The period, begin and end of the longest part that repeats itself; of equally long ones, the shortest period."""
    best: tuple[int, int, int] | None = None
    for period in range(_SHORTEST, len(labels) // 2 + 1):
        same = np.concatenate(([False], labels[:-period] == labels[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        if not edges.size:
            continue
        begins, ends = edges[::2], edges[1::2]
        longest = int(np.argmax(ends - begins))
        start, end = int(begins[longest]), int(ends[longest]) + period
        if end - start >= 2 * period and (best is None or end - start > best[2] - best[1]):
            best = period, start, end
    return best


def _root(node: fx.Node, inside: Collection[fx.Node]) -> fx.Node:
    """The node whose memory a node has; views that other programs create are not followed."""
    while node in inside and _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _pieces(
    runs: Sequence[list[fx.Node] | fx.Node],
    nodes: Sequence[fx.Node],
    kept: Collection[fx.Node | None],
    for_sink: Sequence[fx.Node],
) -> list[Piece]:
    """Determine the inputs and outputs of sections, from the end of the program, where later reads are known."""
    inside = set(nodes)
    sections = {node for run in runs if isinstance(run, list) for node in run}
    read = {node for node in kept if node is not None}
    read.update(node for node in for_sink if _root(node, inside) not in sections)
    order = {node: position for position, node in enumerate(nodes)}
    products = {product.number: product for product in products_of(for_sink, nodes, kept)}
    found: list[Piece] = []
    for run in reversed(runs):
        if isinstance(run, fx.Node):
            if run in read or not _is_view(run):
                read.update(run.all_input_nodes)
                found.append(run)
            continue
        members = set(run)
        sums = tuple((number, node) for number, node in enumerate(for_sink) if _root(node, inside) in members)
        own = tuple(
            product for number, _ in sums
            if (product := products.get(number)) is not None and members.issuperset((product.node, *product.casts))
        )  # fmt: skip
        outside = sorted((node for node in run if node in read), key=order.__getitem__)
        outputs = dict.fromkeys(root for node in outside if (root := _root(node, inside)) in members)
        again = dict[fx.Node, None]()
        for node in outside:
            if node is not _root(node, inside):
                _add_views(node, inside, again)
        computed = outputs | {node: None for _, node in sums}
        inner, inputs = _inner(computed, members, inside, order)
        if inner:
            piece = Fusion(tuple(inner), tuple(inputs), tuple(outputs), sums, own)
            found += [*reversed([*again]), piece]
            read.update(inputs)
        else:
            found += reversed([*again])
        read.update(source for node in again for source in node.all_input_nodes)
    return found[::-1]


def _add_views(node: fx.Node, inside: Collection[fx.Node], found: dict[fx.Node, None]) -> None:
    """Add a view and the views through which it sees its root."""
    if node in inside and _is_view(node):
        _add_views(node.args[0], inside, found)  # type: ignore[arg-type]
        found[node] = None


def _inner(
    wanted: Collection[fx.Node], members: set[fx.Node], inside: set[fx.Node], order: dict[fx.Node, int]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that compute these, with views of earlier sections' results, in order; and the inputs of all."""
    needed, inputs = set[fx.Node](), dict[fx.Node, None]()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        if node in members or (node in inside and _is_view(node) and compilable(node)):
            needed.add(node)
            todo.extend(node.all_input_nodes)
        else:
            inputs[node] = None
    return sorted(needed, key=order.__getitem__), list(inputs)


aten = torch.ops.aten
