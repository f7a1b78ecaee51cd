"""Equal layers are captured once: a model with few of its layers, and its operators with all of them.

Layers that have the same modules and parameters do the same work. So a model is captured with four of its layers, and
the third of these is repeated::

    captured    before  0  1  2  3               after
    the model   before  0  1  2  2  …  2  3      after      layers 1 and 2 of the capture must be equal
"""

from collections.abc import Sequence
from typing import Any

from attrs import evolve, frozen
from torch import nn

from ..costs.graph import OpEdge, OpNode
from .model import ModelWork, OperatorWork

CAPTURED = 4
"""Layers of the capture: the first, the last, and two whose operators are compared."""


@frozen
class Repeated:
    """Equal layers of a model.

    Args:
        path: of the list of layers, such as ``model.layers``.
        count: number of layers of the whole model.
    """

    path: str
    count: int

    def expanded(self, work: ModelWork) -> ModelWork | None:
        """The work of the whole model.

        Args:
            work: of the model with ``CAPTURED`` layers.

        Returns:
            None if the operators of the second and the third layer differ, or layers are connected otherwise than each
            to the next.
        """
        places = [self._layer_of(node.name) for node in work.graph.nodes]
        parts = [_range(places, layer) for layer in range(CAPTURED)]
        if any(part is None for part in parts):
            return None
        first, last = parts[0].start, parts[-1].stop  # type: ignore[union-attr]
        if [places[at] for at in range(first, last)] != sorted(places[at] for at in range(first, last)):
            return None
        one, other = (list(zip(work.graph.nodes, work.operators, strict=True))[part.start : part.stop]
                      for part in parts[1:3] if part)  # fmt: skip
        if not _equal(one, other, self._renamed):
            return None
        edges = self._edges(work)
        if edges is None:
            return None
        nodes, operators = list(work.graph.nodes[:first]), list(work.operators[:first])
        for layer in range(self.count):
            part = parts[self._template(layer)]
            assert part is not None
            nodes += [self._node(node, layer) for node in work.graph.nodes[part.start : part.stop]]
            operators += work.operators[part.start : part.stop]
        nodes += work.graph.nodes[last:]
        operators += work.operators[last:]
        position = {node.name: at for at, node in enumerate(nodes)}
        edges.sort(key=lambda edge: (position[edge.src], position[edge.dst], edge.tensor))
        return ModelWork(evolve(work.graph, nodes=tuple(nodes), edges=tuple(edges)), tuple(operators), work.kernels)

    def _template(self, layer: int) -> int:
        """The layer of the capture that a layer of the model is like."""
        return CAPTURED - 1 if layer == self.count - 1 else min(layer, CAPTURED - 2)

    def _layer_of(self, name: str) -> int:
        """The layer of an operator; −1 for one that is in none."""
        rest = name.removeprefix(f"{self.path}.")
        number = rest.split("/")[0].split(".")[0]
        return int(number) if rest != name and number.isdecimal() else -1

    def _renamed(self, name: str, layer: int) -> str:
        """The name of the same operator, or parameter, of another layer."""
        own = self._layer_of(name)
        prefix = f"{self.path}.{own}"
        return name if own < 0 else f"{self.path}.{layer}{name.removeprefix(prefix)}"

    def _node(self, node: OpNode, layer: int) -> OpNode:
        parameters, frozen_ones = (
            tuple(self._renamed(name, layer) for name in names) for names in (node.parameters, node.frozen)
        )
        return evolve(node, name=self._renamed(node.name, layer), parameters=parameters, frozen=frozen_ones)

    def _edges(self, work: ModelWork) -> list[OpEdge] | None:
        """The edges of the whole model; None if a layer is connected with others than its neighbours and the ends."""
        into: dict[int, list[OpEdge]] = {}
        for edge in work.graph.edges:
            source, reader = self._layer_of(edge.src), self._layer_of(edge.dst)
            near = (-1, CAPTURED - 1) if reader < 0 else (-1, reader - 1, reader)
            if source not in near:
                return None
            into.setdefault(reader, []).append(edge)
        found = [self._edge(edge, self.count - 1, self.count - 1) for edge in into.get(-1, ())]
        for layer in range(self.count):
            template = self._template(layer)
            for edge in into.get(template, ()):
                found.append(self._edge(edge, layer - template + self._layer_of(edge.src), layer))
        return found

    def _edge(self, edge: OpEdge, source: int, reader: int) -> OpEdge:
        return evolve(edge, src=self._renamed(edge.src, source), dst=self._renamed(edge.dst, reader))


def _range(places: Sequence[int], layer: int) -> range | None:
    """Positions of a layer's operators; None if it has none, or if they are not next to each other."""
    if layer not in places:
        return None
    first = places.index(layer)
    found = range(first, first + places.count(layer))
    return found if all(places[at] == layer for at in found) else None


def _equal(
    one: Sequence[tuple[OpNode, OperatorWork]], other: Sequence[tuple[OpNode, OperatorWork]], renamed: Any
) -> bool:
    """Whether the operators of two layers are the same but for the number of the layer, and do the same work."""
    return len(one) == len(other) and all(
        renamed(a.name, 0) == renamed(b.name, 0) and v == w for (a, v), (b, w) in zip(one, other, strict=True)
    )


def shorten(model: nn.Module) -> Repeated | None:
    """Remove all layers of a transformers model but ``CAPTURED``.

    Returns:
        What was there; None, and the model is unchanged, if it has no list of more layers that are equal in their
        modules, parameters, and the numbers and names that these hold.
    """
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return None
    path, layers = max(lists, key=lambda each: (len(each[1]), -len(each[0])))
    kinds = getattr(getattr(model, "config", None), "layer_types", None) or ()
    if len(layers) <= CAPTURED or len(set(kinds)) > 1:
        return None
    first = _signature(layers[1])
    if any(_signature(layer) != first for layer in layers[1:-1]):
        return None
    found = Repeated(path, len(layers))
    del layers[CAPTURED:]
    model.config.num_hidden_layers = CAPTURED  # type: ignore[union-attr]
    return found


def _signature(layer: nn.Module) -> Any:
    """What decides the work of a layer."""
    plain = [
        (path, type(module), sorted((k, repr(v)) for k, v in vars(module).items()
                                    if isinstance(v, int | float | str) and k != "layer_idx"))
        for path, module in layer.named_modules()
    ]  # fmt: skip
    return plain, [(name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
