"""Groups of neighbouring operators that a compiler fuses: those between matrix products, attention and the like.

    order of a program       add  norm ─▶ mm     sum    gelu ─▶ mm
    groups                  ╰────1────╯         ╰1╯    ╰─2─╯
    what runs            [add norm sum]  mm  [gelu]  mm

A group is extended by the next operator as long as that does not depend on an operator that depends on the group.
Operators that do not depend on the group move before it, others after it. So a layer is divided at its products, in the
same way for every cut: equal groups are compiled once, and a compiled program holds, accumulates and frees the same
tensors as one that is not compiled. Views are free inside a group; a reader outside creates the view itself.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx

from .fusible import fusible, is_single_view, parts, values_of

LEAST = 2
"""Smallest number of operators in a group: a single operator is one kernel already."""


@frozen(eq=False)
class Fusion:
    """A group of operators that runs as one.

    Args:
        nodes: in order, with the views through which they read.
        inputs: nodes outside that it reads.
        outputs: its nodes that are read outside: no views, and none that share memory.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def all_input_nodes(self) -> tuple[fx.Node, ...]:
        """Its inputs, under the name that ``fx.Node`` has for them."""
        return self.inputs

    def graph(self) -> fx.Graph:
        """The group as a separate graph, which returns its outputs in a tuple."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for number, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"x{number}")
        for node in self.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = {}  # it is of another trace; a compiler computes its own
        graph.output(tuple(copies[node] for node in self.outputs))
        return graph


Piece = fx.Node | Fusion

Call = Callable[..., Sequence[Tensor]]
"""Takes a group's inputs as arguments, and returns its outputs."""


@frozen
class Fusions:
    """The calls of groups in programs. Until `bind`, a call only allocates its outputs.

    Args:
        places: the global variables of a program, the name in them that the program calls, and the group.
    """

    places: list[tuple[dict[str, Any], str, Fusion]] = field(factory=list)

    def add(self, scope: dict[str, Any], name: str, fusion: Fusion) -> None:
        """Bind a name in a program to a group."""
        scope[name] = _allocating(fusion)
        self.places.append((scope, name, fusion))

    def bind(self, call_of: Callable[[Fusion], Call]) -> None:
        """Set the function of each group."""
        for scope, name, fusion in self.places:
            scope[name] = call_of(fusion)


def _allocating(fusion: Fusion) -> Call:
    made = [node.meta["val"] for node in fusion.outputs]

    def call(*_given: Tensor) -> list[Tensor]:
        return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in made]

    return call


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
        for node in piece.nodes if isinstance(piece, Fusion) else [piece]:
            put(node)
    for node in nodes:
        put(node)
    return list(order)
