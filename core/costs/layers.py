"""The layers of a model, from the names of its operators: the children of a ModuleList or Sequential that repeat.

An operator's name is ``module.path/operator``. A part of the path that is a number is a child of a list of modules; the
outermost list whose children are alike is the list of layers: ``encoder.block.3`` of ``encoder.block.3.layer.0/mm``.
In files, whose names are free, the parts may also end in the number: ``layer3.attention``.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from attrs import evolve

from ..errors import RequestError
from .graph import OpGraph, OpNode

ALIKE = 0.5
"""Smallest share of operators that two children of a list have in common if they are like each other."""
_NAMED = re.compile(r"(.*?[^\d_-])[_-]?(\d+)")
_BARE = ("layer", "block", "l", "h")
"""Names of layers that are a whole operator of a file, such as ``layer3``."""

Layer = tuple[str, ...]
"""The list's path, and the number of the layer in it."""


def is_in_layer(name: str) -> bool:
    """Whether an operator is in a child of a list of modules."""
    return bool(_numbered(name))


def recomputing_layers(graph: OpGraph, every: int) -> OpGraph:
    """The graph in which each ``every``-th layer keeps its inputs alone, and computes the rest again in its backward.

    Args:
        graph: with costs.
        every: the first layer, and each one after as many.

    Raises:
        RequestError: as of `layer_blocks`.
    """
    names = [node.name for node in graph.nodes]
    layers = [block for block in layer_blocks(names) if any(_numbered(name) for name in block)]
    again = {name: number for number, block in enumerate(layers[::every]) for name in block}
    inputs: list[dict[tuple[str, int], int]] = [{} for _ in layers[::every]]
    for edge in graph.edges:
        reader = again.get(edge.dst)
        if reader is not None and again.get(edge.src) != reader and edge.gradient:
            inputs[reader][edge.src, edge.tensor] = edge.bytes
    saved = [sum(graph.nodes[graph.index[name]].saved_bytes for name in block) for block in layers[::every]]

    def changed(node: OpNode) -> OpNode:
        if node.name not in again:
            return node
        layer = again[node.name]
        return evolve(
            node,
            backward_input_s=node.backward_input_s + node.forward_s,
            saved_bytes=sum(inputs[layer].values()) if node.name == layers[::every][layer][0] else 0,
            workspace_bytes=node.workspace_bytes + saved[layer],
            reductions=None if node.reductions is None else node.reductions.recomputed(),
        )

    return evolve(graph, nodes=tuple(map(changed, graph.nodes)))


def layer_blocks(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The operators in blocks that no stage may divide: each layer, and the operators before, between and after layers.

    Args:
        names: of the operators, in the graph's order.

    Raises:
        RequestError: no layers are known, or their operators alternate.
    """
    layers = next((found for each in (_numbered, _ending_in_number) if any(found := _layers(names, each))), None)
    if layers is None:
        raise RequestError(
            "no layers are known: no operators have the names of modules that repeat, such as 'layers.3/linear' or "
            "'layer3.linear'; leave boundaries='layers' (--layers) out"
        )
    last = {layer: place for place, layer in enumerate(layers)}
    starts, end = [0], last[layers[0]] if layers[0] else 0
    for place in range(1, len(names)):
        layer, before = layers[place], layers[place - 1]
        if place > end and (layer or before) and layer != before:
            starts.append(place)
        end = max(end, last[layer] if layer else place)
    if len(starts) == 1:
        raise RequestError(
            "the operators of all layers alternate, so that no stage can end between two layers; leave "
            "boundaries='layers' (--layers) out"
        )
    return tuple(tuple(names[a:b]) for a, b in pairwise([*starts, len(names)]))


Lists = Callable[[str], list[tuple[Layer, str]]]
"""An operator's name → for each list that it is in, from the outermost: the layer, and the rest of the name."""


def _numbered(name: str) -> list[tuple[Layer, str]]:
    """Parts of the path that are numbers."""
    parts, operator = _parts(name)
    return [
        (tuple(parts[: i + 1]), ".".join([*parts[i + 1 :], operator]))
        for i, part in enumerate(parts)
        if part.isdecimal()
    ]


def _ending_in_number(name: str) -> list[tuple[Layer, str]]:
    """Parts of the path that end in a number."""
    parts, operator = _parts(name)
    found = []
    for i, part in enumerate(parts):
        match = _NAMED.fullmatch(part)
        whole = not operator and i == len(parts) - 1
        if match and (not whole or match[1].lower() in _BARE):
            found.append(((*parts[:i], match[1], match[2]), ".".join([*parts[i + 1 :], operator])))
    return found


def _parts(name: str) -> tuple[list[str], str]:
    module, slash, operator = name.rpartition("/")
    return [part for part in (module if slash else operator).split(".") if part], operator if slash else ""


def _layers(names: Sequence[str], lists: Lists) -> list[Layer]:
    """The layer of each operator; an empty one for operators in none."""
    inside: dict[Layer, dict[Layer, set[str]]] = {}
    for name in names:
        for layer, rest in lists(name):
            inside.setdefault(layer[:-1], {}).setdefault(layer, set()).add(rest)
    repeating = {path for path, layers in inside.items() if _repeat(layers)}
    return [next((layer for layer, _ in lists(name) if layer[:-1] in repeating), ()) for name in names]


def _repeat(layers: dict[Layer, set[str]]) -> bool:
    """Whether the children of a list repeat: most operators are in children that are like one at a distance of 1 or 2.

    A distance of 2 is that of equal modules in a Sequential of two alternating kinds. A list of an embedding, one
    container of layers and a head is not a list of layers, because most operators are in children without a like.

    Args:
        layers: each child → its operators, with names relative to the child.
    """
    children = [layers[layer] for layer in sorted(layers, key=lambda layer: int(layer[-1]))]
    alike: set[int] = set()
    for i, j in [*pairwise(range(len(children))), *zip(range(len(children)), range(2, len(children)), strict=False)]:
        if len(children[i] & children[j]) >= ALIKE * len(children[i] | children[j]):
            alike |= {i, j}
    return 2 * sum(len(children[i]) for i in alike) > sum(map(len, children))
