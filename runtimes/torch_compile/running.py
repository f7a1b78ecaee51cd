"""Running the stages: all forwards over the threads, and later all backwards, between which saved tensors are held.

    forward:   device 0   F0 F1 F2 F3                  backward:   device 0            B0 B1 B2 B3
               device 1      F0 F1 F2 F3                           device 1   B0 B1 B2 B3

A stage runs under autograd, from leaves of its own; messages go through the backend of threads. Each device keeps to
the order of the microbatches, and every message has one reader, so that nothing can wait in a circle.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx

from ...backends.contract import Backend, Handle
from ...core.capture.graph.randomness import KeyedRandom, random_key
from ...core.errors import RequestError
from ..launch.team import ThreadTeam
from .cutting import Stage
from .seen import Seen


@frozen(eq=False)
class Work:
    """What is run for arguments of certain shapes.

    Args:
        stages: one a device.
        sizes: samples of each microbatch.
        seen: samples → what every node is then.
        batched: places of the arguments that are cut, and of numbers that are their size.
        outputs: nodes given back, in order.
        random: whether anything is drawn.
    """

    stages: Sequence[Stage]
    sizes: Sequence[int]
    seen: Mapping[int, Mapping[fx.Node, Seen]]
    batched: frozenset[int]
    outputs: Sequence[fx.Node]
    random: bool


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
class Pass:
    """One forward and its backward.

    Args:
        work: what is run.
        arguments: of the graph.
        gradients: whether a backward follows.
        key: of the random numbers of this pass.
    """

    work: Work
    arguments: Sequence[Any]
    gradients: bool
    key: tuple[int, int] = (0, 0)
    _held: dict[tuple[int, int], _Held] = field(factory=dict)
    _sources: dict[fx.Node, int] = field(factory=dict)
    _readers: dict[fx.Node, list[int]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for number, stage in enumerate(self.work.stages):
            self._sources |= dict.fromkeys(stage.outgoing, number)
            for node in stage.incoming:
                self._readers.setdefault(node, []).append(number)

    # Forward

    def forward(self) -> list[Tensor]:
        """All forwards. Returns the graph's outputs for the whole batch."""
        device = next(value.device.type for value in self.arguments if isinstance(value, Tensor))
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        team = ThreadTeam(len(self.work.stages))

        def work(number: int) -> list[dict[fx.Node, Tensor]]:
            with torch.set_grad_enabled(self.gradients), torch.autocast(device, autocast[1], enabled=autocast[0]):
                return self._forwards(number, team.backend(number))

        found = team.run_local(work)
        return [
            torch.cat([made[node] for made in found[self._sources[node]]]) for node in self.work.outputs
        ]  # fmt: skip

    def _forwards(self, number: int, backend: Backend) -> list[dict[fx.Node, Tensor]]:
        stage, results, flying = self.work.stages[number], [], list[tuple[Handle, Any]]()
        # A leaf of the stage's own, one for all microbatches, so that autocast casts it once; the user's tensor gets
        # its whole gradient outside, and there its hooks are called.
        leaves = {place: self._leaf(self.arguments[place]) for place in stage.arguments}
        start = 0
        for microbatch, size in enumerate(self.work.sizes):
            held = _Held({}, {})
            given = [self._argument(leaves[place], place, start, size, held) for place in stage.arguments]
            given += self._received(stage, size, held, backend)
            with ExitStack() as contexts:
                if self.work.random:
                    key = random_key(*self.key, microbatch)
                    contexts.enter_context(KeyedRandom(key, stage.first_draw))
                values = stage.module(*given)
            held.values = dict(zip(stage.outgoing, values, strict=True))
            for reader in range(number + 1, len(self.work.stages)):
                message = [
                    held.values[n].detach() for n in stage.outgoing if n in self.work.stages[reader].incoming
                ]  # fmt: skip
                if message:
                    flying.append((backend.send(message, reader), message))
            results.append({node: held.values[node].detach() for node in stage.outgoing if node in self.work.outputs})
            if self.gradients:
                self._held[number, microbatch] = held
            start += size
        for handle, _ in flying:
            handle.wait()
        return results

    def _leaf(self, value: Any) -> Any:
        """An argument cut off from the graph of autograd outside."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        return value.detach().requires_grad_(self.gradients)

    def _argument(self, value: Any, place: int, start: int, size: int, held: _Held) -> Any:
        if place in self.work.batched:
            if not isinstance(value, Tensor):
                return size
            value = value.detach().narrow(0, start, size).requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.requires_grad:
            held.leaves[place] = value
        return value

    def _received(self, stage: Stage, size: int, held: _Held, backend: Backend) -> list[Tensor]:
        buffers: dict[fx.Node, Tensor] = {}
        seen, device = self.work.seen[size], self._device()
        for source in sorted({self._sources[node] for node in stage.incoming}):
            nodes = [n for n in self.work.stages[source].outgoing if n in stage.incoming]
            message = [torch.empty(seen[n].shape, dtype=seen[n].dtype, device=device) for n in nodes]
            backend.receive(message, source).wait()
            buffers |= dict(zip(nodes, message, strict=True))
        for node in stage.incoming:
            if self._returns(node, size):
                held.leaves[node] = buffers[node].requires_grad_()
        return [buffers[node] for node in stage.incoming]

    def _returns(self, node: fx.Node, size: int) -> bool:
        """Whether a gradient of a message comes back."""
        return self.gradients and self.work.seen[size][node].differentiable

    def _device(self) -> torch.device:
        return next(value.device for value in self.arguments if isinstance(value, Tensor))

    # Backward

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All backwards.

        Args:
            gradients: of the outputs, for the whole batch.

        Returns:
            Of the arguments; None for those without one.

        Raises:
            RequestError: a second time.
        """
        if not self._held:
            raise RequestError(
                "backward runs a second time and panpipe has let go of the saved tensors: call the model again"
            )
        team = ThreadTeam(len(self.work.stages))
        wanted = dict(zip(self.work.outputs, gradients, strict=True))
        found = team.run_local(lambda number: self._backwards(number, team.backend(number), wanted))
        return [
            self._gradient(place, [found[number] for number in sorted(found)]) for place in range(len(self.arguments))
        ]

    def _backwards(
        self, number: int, backend: Backend, wanted: Mapping[fx.Node, Tensor | None]
    ) -> dict[int, list[Tensor | None]]:
        """Gradients of arguments: by place, one of each microbatch for what is cut, else one."""
        stage, flying = self.work.stages[number], list[tuple[Handle, Any]]()
        found: dict[int, list[Tensor | None]] = {}
        start = 0
        for microbatch, size in enumerate(self.work.sizes):
            held = self._held.pop((number, microbatch))
            tangents = self._tangents(number, size, start, wanted, backend)
            leaves, ends = list(held.leaves), [n for n in held.values if n in tangents and held.values[n].requires_grad]
            made: Sequence[Tensor | None] = [None] * len(leaves)
            if ends and leaves:
                made = torch.autograd.grad(
                    [held.values[node] for node in ends], [held.leaves[leaf] for leaf in leaves],
                    [tangents[node] for node in ends], allow_unused=True,
                )  # fmt: skip
            gradients = dict(zip(leaves, made, strict=True))
            for source in sorted({self._sources[node] for node in stage.incoming}):
                message = [
                    _dense(gradients[node], held.leaves[node])
                    for node in self.work.stages[source].outgoing
                    if node in held.leaves
                ]
                if message:
                    flying.append((backend.send(message, source), message))
            for place in stage.arguments:
                if place in held.leaves:
                    self._add(found, place, gradients[place])
            start += size
        for handle, _ in flying:
            handle.wait()
        return found

    def _tangents(
        self, number: int, size: int, start: int, wanted: Mapping[fx.Node, Tensor | None], backend: Backend
    ) -> dict[fx.Node, Tensor]:
        """Gradients of what a stage gave: from outside, and from its readers, the last one first."""
        stage, seen, device = self.work.stages[number], self.work.seen[size], self._device()
        found = {
            node: gradient.narrow(0, start, size)
            for node, gradient in wanted.items()
            if gradient is not None and node in stage.outgoing
        }
        for reader in range(len(self.work.stages) - 1, number, -1):
            nodes = [n for n in stage.outgoing if n in self.work.stages[reader].incoming and self._returns(n, size)]
            message = [torch.empty(seen[n].shape, dtype=seen[n].dtype, device=device) for n in nodes]
            if message:
                backend.receive(message, reader).wait()
                for node, gradient in zip(nodes, message, strict=True):
                    found[node] = found[node] + gradient if node in found else gradient
        return found

    def _add(self, found: dict[int, list[Tensor | None]], place: int, gradient: Tensor | None) -> None:
        kept = found.setdefault(place, [])
        if place in self.work.batched or not kept:
            kept.append(gradient)
        elif gradient is not None:
            kept[0] = gradient if kept[0] is None else kept[0] + gradient

    def _gradient(self, place: int, found: Sequence[Mapping[int, list[Tensor | None]]]) -> Tensor | None:
        parts = [one[place] for one in found if place in one]
        sums = [_sum(row) for row in zip(*parts, strict=True)]
        if not sums or all(one is None for one in sums):
            return None
        if place not in self.work.batched:
            return sums[0]
        value = self.arguments[place]
        pieces = value.detach().split(list(self.work.sizes))
        return torch.cat([_dense(one, piece) for one, piece in zip(sums, pieces, strict=True)])


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    there = [gradient for gradient in gradients if gradient is not None]
    total = there[0] if there else None
    for gradient in there[1:]:
        total = gradient if total is None else total + gradient
    return total


def _dense(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient
