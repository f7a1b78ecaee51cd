"""Groups of neighbouring operators that a compiler makes one of: what lies between products, attention and the like.

    order of a program       add  norm ─▶ mm     sum    gelu ─▶ mm
    groups                  ╰────1────╯         ╰1╯    ╰─2─╯
    what runs            [add norm sum]  mm  [gelu]  mm

A group takes in what follows it as long as nothing that it reads waits for an operator that itself waits for the group.
Operators that wait for no group move in front of it, others behind. So a layer falls apart at its products, the same
way wherever a stage is cut: equal groups are compiled once, and what a compiled program holds, adds up and lets go of
is what the plain one does. Views cost nothing inside a group; whoever reads one outside makes it there.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx

from .fusible import fusible, parts, shows, values_of

LEAST = 2
"""Operators that a group has at least: one alone is a kernel already."""


@frozen(eq=False)
class Fusion:
    """A group of operators that runs as one.

    Args:
        nodes: in order, with the views through which they read.
        inputs: what it reads from outside.
        outputs: what is read outside: no views, and nothing that shares memory.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def all_input_nodes(self) -> tuple[fx.Node, ...]:
        """What it reads, under the name that a node has for that."""
        return self.inputs

    def graph(self) -> fx.Graph:
        """The group as a graph of its own, which returns its outputs in a tuple."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for number, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"x{number}")
        for node in self.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = {}  # of another trace: a compiler makes its own
        graph.output(tuple(copies[node] for node in self.outputs))
        return graph


Piece = fx.Node | Fusion

Call = Callable[..., Sequence[Tensor]]
"""Takes a group's inputs, each by itself, and returns its outputs."""


@frozen
class Fusions:
    """Where programs call groups. Until it is known what they call, that only takes the memory of their outputs.

    Args:
        places: the variables of a program, a name among them, and the group that it stands for.
    """

    places: list[tuple[dict[str, Any], str, Fusion]] = field(factory=list)

    def add(self, scope: dict[str, Any], name: str, fusion: Fusion) -> None:
        """Have a name in a program stand for a group."""
        scope[name] = _taking_memory(fusion)
        self.places.append((scope, name, fusion))

    def bind(self, call_of: Callable[[Fusion], Call]) -> None:
        """Say what is called for each group."""
        for scope, name, fusion in self.places:
            scope[name] = call_of(fusion)


def _taking_memory(fusion: Fusion) -> Call:
    made = [node.meta["val"] for node in fusion.outputs]

    def call(*_given: Tensor) -> list[Tensor]:
        return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in made]

    return call


@define(eq=False)
class _Group:
    """A group that is being collected.

    Args:
        nodes: in it.
        before: operators and views that wait for no node of it, in order; they run in front of it.
        after: others; they run behind it.
        waiting: what of these is no view of the group's own nodes.
    """

    nodes: dict[fx.Node, None] = field(factory=dict)
    before: list[fx.Node] = field(factory=list)
    after: list[fx.Node] = field(factory=list)
    waiting: set[fx.Node] = field(factory=set)


def fused(nodes: Sequence[fx.Node], kept: Collection[fx.Node | None]) -> list[Piece]:
    """What a program runs, with groups in the place of their operators, in an order that is as sound.

    Args:
        nodes: of the program, in order; views that nobody reads outside of groups are not in the result.
        kept: what it returns or hands over.
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
            if waits or not shows(node):
                group.waiting.add(node)
        else:
            group.before.append(node)
    close()
    return _pieces(runs, inside, kept)


def _on_one_device(node: fx.Node, group: _Group) -> bool:
    first = next(iter(group.nodes), node)
    return bool(values_of(first)[0].device == values_of(node)[0].device)


def _root(node: fx.Node, inside: Collection[fx.Node]) -> fx.Node:
    """What a node of the program shows, as far as the program itself makes the view."""
    while node in inside and shows(node):
        node = node.all_input_nodes[0]
    return node


def _pieces(
    runs: Sequence[list[fx.Node] | fx.Node], inside: Collection[fx.Node], kept: Collection[fx.Node | None]
) -> list[Piece]:
    """Close groups over what they read and make; from the end, where it is known what is read later."""
    read = {node for node in kept if node is not None}
    found: list[Piece] = []
    for run in reversed(runs):
        if isinstance(run, fx.Node):
            if run in read or not shows(run):
                read.update(run.all_input_nodes)
                found.append(run)
            continue
        members = set(run)
        nodes, inputs = dict[fx.Node, None](), dict[fx.Node, None]()
        for node in run:
            for source in node.all_input_nodes:
                _take_in(source, members, inside, nodes, inputs)
            nodes[node] = None
        if outputs := tuple(node for node in run if node in read):
            found.append(Fusion(tuple(nodes), tuple(inputs), outputs))
            read.update(inputs)
    return found[::-1]


def _take_in(
    source: fx.Node,
    members: Collection[fx.Node],
    inside: Collection[fx.Node],
    nodes: dict[fx.Node, None],
    inputs: dict[fx.Node, None],
) -> None:
    """Have what a member reads in a group: itself, or the views that lead to it and what they show."""
    if source in members or source in nodes:
        return
    if source in inside and shows(source):
        _take_in(source.all_input_nodes[0], members, inside, nodes, inputs)
        nodes[source] = None
    else:
        inputs[source] = None


def running_order(nodes: Sequence[fx.Node], pieces: Sequence[Piece]) -> list[fx.Node]:
    """All nodes of a program, those too that are gone or inside of groups, in an order in which they could run.

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
