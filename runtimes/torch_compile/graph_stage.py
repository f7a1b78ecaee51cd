"""A stage of a graph: F runs it under autograd, B is autograd's, and between them it holds the saved tensors."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor, fx

from ...core.capture.graph.randomness import KeyedRandom
from ..optimizer.state import StageState
from ..programs.linked_stage import LinkedStage

if TYPE_CHECKING:
    from .running import Work


@define(eq=False)
class _Held:
    """What a stage holds of a microbatch between F and B.

    Args:
        leaves: node or place of an argument → the leaf that its gradient is wanted for.
        values: what the stage gave.
    """

    leaves: dict[Any, Tensor]
    values: dict[fx.Node, Tensor]


@define(eq=False)
class StagePass:
    """What all microbatches of a pass share at one stage.

    Args:
        arguments: place → a leaf of the stage's own, for what is not cut: one for all microbatches, so that autocast
            casts it once. The user's tensor gets its whole gradient outside, and there its hooks are called.
        wanted: output → its gradient for the whole batch.
        gradients: place → of each microbatch for what is cut, else one.
    """

    arguments: dict[int, Any] = field(factory=dict)
    wanted: Mapping[fx.Node, Tensor | None] = field(factory=dict)
    gradients: dict[int, list[Tensor | None]] = field(factory=dict)

    def add(self, place: int, gradient: Tensor | None, cut: bool) -> None:
        kept = self.gradients.setdefault(place, [])
        if cut or not kept:
            kept.append(gradient)
        elif gradient is not None:
            kept[0] = gradient if kept[0] is None else kept[0] + gradient


class GraphStage(LinkedStage):
    """A stage of a graph for one microbatch: F runs it under autograd, from leaves of its own; B is autograd's.

    Args:
        work: what is run.
        number: the stage.
        microbatch: which of them.
        gradients: whether a backward follows.
        shared: what all microbatches share.
    """

    def __init__(self, work: "Work", number: int, microbatch: int, gradients: bool, shared: StagePass) -> None:
        self._work, self._stage, self._shared, self._gradients = work, work.stages[number], shared, gradients
        self._start, self._size = sum(work.sizes[:microbatch]), work.sizes[microbatch]
        readers = work.stages[number + 1 :]
        self._outputs = [n for n in self._stage.outgoing if any(n in reader.incoming for reader in readers)]
        self._results = [n for n in self._stage.outgoing if n in work.outputs]
        self._held: _Held | None = None
        boundary, outputs = (
            [work.boundary(node, self._size, gradients) for node in nodes]
            for nodes in (self._stage.incoming, self._outputs)
        )
        self._differentiable = {n for n, b in zip(self._stage.incoming, boundary, strict=True) if b.differentiable}
        layout, results = work.layout(self._size, gradients), [node.name for node in self._results]
        super().__init__(number, boundary, outputs, results, layout, StageState({}, {}, None), self._stage.arguments)

    def forward(
        self, microbatch: int, boundary: list[Any], leaves: tuple[Any, ...], key: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        held = _Held({}, {})
        with ExitStack() as contexts:
            contexts.enter_context(torch.set_grad_enabled(self._gradients))
            given = [self._argument(place, leaves[place], held) for place in self._stage.arguments]
            for node, value in zip(self._stage.incoming, boundary, strict=True):
                if node in self._differentiable:
                    held.leaves[node] = value.requires_grad_()
            if self._work.random:
                contexts.enter_context(KeyedRandom(key, self._stage.first_draw))
            values = self._stage.module(*given, *boundary)
        held.values = dict(zip(self._stage.outgoing, values, strict=True))
        self._held = held if self._gradients else None
        outputs, results = ([held.values[n].detach() for n in nodes] for nodes in (self._outputs, self._results))
        return outputs, results

    def _argument(self, place: int, leaf: Any, held: _Held) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        if place in self._work.batched:
            value = leaf.detach().requires_grad_(self._gradients)
        else:
            value = self._shared.arguments.setdefault(place, leaf.detach().requires_grad_(self._gradients))
        if self._gradients:
            held.leaves[place] = value
        return value

    def backward(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        assert self._held is not None
        held, self._held = self._held, None
        given = {
            node: gradient.narrow(0, self._start, self._size)
            for node, gradient in self._shared.wanted.items()
            if gradient is not None and node in held.values
        }
        for place, gradient in tangents.items():
            node = self._outputs[place]
            given[node] = given[node] + gradient if node in given else gradient
        wanted, ends = list(held.leaves), [n for n, value in held.values.items() if n in given and value.requires_grad]
        made: Sequence[Tensor | None] = [None] * len(wanted)
        if ends and wanted:
            made = torch.autograd.grad(
                [held.values[node] for node in ends], [held.leaves[leaf] for leaf in wanted],
                [given[node] for node in ends], allow_unused=True,
            )  # fmt: skip
        gradients = dict(zip(wanted, made, strict=True))
        for place in self._stage.arguments:
            if place in held.leaves:
                self._shared.add(place, gradients[place], place in self._work.batched)
        nodes = self._stage.incoming
        return [
            [dense(gradients[nodes[i]], held.leaves[nodes[i]]) for i in places] for places in self.returned.values()
        ]


def dense(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient; zeros where there is none."""
    return torch.zeros_like(like) if gradient is None else gradient
