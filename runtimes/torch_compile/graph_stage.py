"""A stage of a graph: F runs it under autograd, autograd computes B, and the autograd graph holds the saved tensors."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, fx

from ...core.capture.graph.randomness import KeyedRandom
from ..optimizer.stage_state import StageState
from ..programs.linked_stage import LinkedStage
from .cut_graph import CutGraph


@define(eq=False)
class _ForwardResult:
    """The inputs and outputs of F that B needs, for one microbatch.

    Args:
        leaves: node, or position of an argument → the leaf whose gradient B computes.
        values: outgoing node → its value.
    """

    leaves: dict[Any, Tensor]
    values: dict[fx.Node, Tensor]


@define(eq=False)
class StagePass:
    """What all microbatches of a pass share at one stage.

    Args:
        arguments: position → a separate leaf for each argument that is not cut: one for all microbatches, so that
            autocast casts it once. Its whole gradient goes to the user's tensor, whose hooks autograd then calls.
        wanted: output → its gradient for the whole batch.
        gradients: position → the gradient of each microbatch for an argument that is cut, otherwise their sum.
    """

    arguments: dict[int, Any] = field(factory=dict)
    wanted: Mapping[fx.Node, Tensor | None] = field(factory=dict)
    gradients: dict[int, list[Tensor | None]] = field(factory=dict)

    def add(self, place: int, gradient: Tensor | None, cut: bool) -> None:
        """Add the gradient of an argument for one microbatch."""
        kept = self.gradients.setdefault(place, [])
        if cut or not kept:
            kept.append(gradient)
        elif gradient is not None:
            kept[0] = gradient if kept[0] is None else kept[0] + gradient


class GraphStage(LinkedStage):
    """A stage of a graph for one microbatch.

    Args:
        graph: the cut graph.
        number: the stage.
        microbatch: the microbatch.
        gradients: whether a backward follows.
        shared: what all microbatches share.
    """

    def __init__(self, graph: CutGraph, number: int, microbatch: int, gradients: bool, shared: StagePass) -> None:
        self._graph, self._stage, self._shared, self._gradients = graph, graph.stages[number], shared, gradients
        self._start, self._size = sum(graph.sizes[:microbatch]), graph.sizes[microbatch]
        readers = graph.stages[number + 1 :]
        self._outputs = [n for n in self._stage.outgoing if any(n in reader.incoming for reader in readers)]
        self._results = [n for n in self._stage.outgoing if n in graph.outputs]
        self._forward_result: _ForwardResult | None = None
        boundary, outputs = (
            [graph.boundary(node, self._size, gradients) for node in nodes]
            for nodes in (self._stage.incoming, self._outputs)
        )
        self._differentiable = {n for n, b in zip(self._stage.incoming, boundary, strict=True) if b.differentiable}
        layout, results = graph.layout(self._size, gradients), [node.name for node in self._results]
        super().__init__(number, boundary, outputs, results, layout, StageState({}, {}, None), self._stage.arguments)

    def forward(
        self, microbatch: int, boundary: list[Any], leaves: tuple[Any, ...], key: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        found = _ForwardResult({}, {})
        with ExitStack() as contexts:
            contexts.enter_context(torch.set_grad_enabled(self._gradients))
            arguments = [self._argument(place, leaves[place], found) for place in self._stage.arguments]
            for node, value in zip(self._stage.incoming, boundary, strict=True):
                if node in self._differentiable:
                    found.leaves[node] = value.requires_grad_()
            if self._graph.random:
                contexts.enter_context(KeyedRandom(key, self._stage.first_draw))
            values = self._stage.module(*arguments, *boundary)
        found.values = dict(zip(self._stage.outgoing, values, strict=True))
        self._forward_result = found if self._gradients else None
        outputs, results = ([found.values[n].detach() for n in nodes] for nodes in (self._outputs, self._results))
        return outputs, results

    def _argument(self, place: int, leaf: Any, found: _ForwardResult) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        if place in self._graph.batched:
            value = leaf.detach().requires_grad_(self._gradients)
        else:
            value = self._shared.arguments.setdefault(place, leaf.detach().requires_grad_(self._gradients))
        if self._gradients:
            found.leaves[place] = value
        return value

    def backward(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        assert self._forward_result is not None
        found, self._forward_result = self._forward_result, None
        ends = {
            node: gradient.narrow(0, self._start, self._size)
            for node, gradient in self._shared.wanted.items()
            if gradient is not None and node in found.values
        }
        for place, gradient in tangents.items():
            node = self._outputs[place]
            ends[node] = ends[node] + gradient if node in ends else gradient
        wanted = list(found.leaves)
        nodes = [n for n, value in found.values.items() if n in ends and value.requires_grad]
        computed: Sequence[Tensor | None] = [None] * len(wanted)
        if nodes and wanted:
            computed = torch.autograd.grad(
                [found.values[node] for node in nodes], [found.leaves[leaf] for leaf in wanted],
                [ends[node] for node in nodes], allow_unused=True,
            )  # fmt: skip
        gradients = dict(zip(wanted, computed, strict=True))
        for place in self._stage.arguments:
            if place in found.leaves:
                self._shared.add(place, gradients[place], place in self._graph.batched)
        incoming = self._stage.incoming
        return [
            [dense(gradients[incoming[i]], found.leaves[incoming[i]]) for i in places]
            for places in self.returned.values()
        ]


def dense(gradient: Tensor | None, like: Tensor) -> Tensor:
    """The gradient, or zeros if it is None."""
    return torch.zeros_like(like) if gradient is None else gradient
