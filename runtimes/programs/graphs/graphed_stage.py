"""A stage whose actions replay graphs: one for each kind of action and microbatch.

    capture   inputs ─▶ their addresses, or slots ─▶ program of the stage, recorded ─▶ outputs, used as in a step
    replay    inputs ──copied where the address is another──▶ slots ─▶ graph ─▶ the same outputs, at the same addresses

During a capture the stage's Python runs as in a step: it holds and frees saved tensors, computes shared tensors in the
first F, sets the first gradient of a parameter and adds the others. A replay repeats what was recorded of that, sets
the seeds of random draws, and sets the gradients of parameters that the capture set.

The bytes that a stage holds for a microbatch are noted while its actions are captured: a replay frees nothing, so
nothing there shows when a step frees its saved tensors. A watched step gets a tensor on the meta device instead, with
as many bytes, from and until the same actions. A tensor that two stages of a device hold counts for both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....core.actions import Kind
from ....core.capture.graph.randomness import GraphGenerators
from ....core.capture.graph.storages import storage_sizes
from ..stage_run import StageRun
from .graph_pool import CudaGraph, CudaGraphPool

CallKey = tuple[int, Kind, int]
"""Stage, kind, microbatch."""


@frozen
class GraphedCall:
    """A captured action.

    Args:
        assigned: the parameters that have no gradient before it, with the gradients after it.
        held: bytes that the stage holds for the microbatch after it.
    """

    graph: CudaGraph
    inputs: Sequence[Tensor]
    generators: GraphGenerators
    outputs: Any
    assigned: Sequence[tuple[nn.Parameter, Tensor]]
    held: int

    def replay(self, given: Sequence[Tensor], key: Tensor) -> Any:
        """Run the action."""
        for slot, value in zip(self.inputs, given, strict=True):
            if slot.data_ptr() != value.data_ptr():
                slot.copy_(value, non_blocking=True)
        if self.generators.all:
            self.generators.seed(key)
        self.graph.replay()
        for parameter, gradient in self.assigned:
            parameter.grad = gradient
        return self.outputs


@define(eq=False)
class Capture:
    """The captures of one device.

    Args:
        owned: addresses of memory of the pool that inputs may have.
    """

    pool: CudaGraphPool
    calls: dict[CallKey, GraphedCall] = field(factory=dict)
    owned: set[int] = field(factory=set)

    def own(self, tensors: Sequence[Tensor]) -> None:
        """Note that tensors are in the pool's memory, so that an action that reads them needs no copy."""
        self.owned.update(tensor.data_ptr() for tensor in tensors)

    def slot(self, tensor: Tensor) -> Tensor:
        """The tensor, if it has the pool's memory; otherwise a tensor like it, to be copied to in each replay."""
        if tensor.data_ptr() in self.owned:
            return tensor
        with self.pool.allocating():
            return torch.empty_like(tensor)


class GraphedStage(StageRun):
    """A stage that captures the actions of another one, or replays them; what it does not define is the other's.

    Attributes:
        capture: receives the captured actions; None to replay.
        calls: the captured actions that are replayed.
        stand_ins: for each microbatch what it holds in a step that replays, if the step is watched.
    """

    def __init__(self, run: StageRun) -> None:
        self.run, self.index, self.batch, self.boundary = run, run.index, run.batch, run.boundary
        self.capture: Capture | None = None
        self.calls: Mapping[CallKey, GraphedCall] = {}
        self.stand_ins: dict[int, Tensor] = {}
        self._holds: dict[int, int] = {}
        self._no_key = torch.full((3,), -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)

    def forward(
        self, microbatch: int, boundary: list[Any], leaves: tuple[Any, ...], key: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        def run(given: list[Tensor], fixed: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
            count = len(self.boundary)
            own = given[:count]
            given.clear()
            return self.run.forward(microbatch, own, fixed, self._no_key)

        given = [*boundary, *self._read(leaves)]
        boundary.clear()
        found: tuple[list[Tensor], list[Tensor]] = self._call(Kind.F, microbatch, given, leaves, key, run)
        return found

    def recompute(self, microbatch: int, leaves: tuple[Any, ...], key: Tensor) -> None:
        def run(given: list[Tensor], fixed: tuple[Any, ...]) -> list[Tensor]:
            given.clear()
            self.run.recompute(microbatch, fixed, self._no_key)
            return []

        self._call(Kind.RECOMPUTE, microbatch, self._read(leaves), leaves, key, run)

    def backward(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        return self._graphed_backward(Kind.B, self.run.backward, microbatch, tangents, seed, leaves, key)

    def backward_input(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        return self._graphed_backward(Kind.I, self.run.backward_input, microbatch, tangents, seed, leaves, key)

    def backward_weight(self, microbatch: int, seed: Tensor, leaves: tuple[Any, ...], key: Tensor) -> None:
        def program(m: int, tangents: Any, seed: Tensor, leaves: tuple[Any, ...], key: Tensor) -> list[list[Tensor]]:
            self.run.backward_weight(m, seed, leaves, key)
            return []

        self._graphed_backward(Kind.W, program, microbatch, {}, seed, leaves, key)

    def _graphed_backward(
        self,
        kind: Kind,
        program: Callable[..., list[list[Tensor]]],
        microbatch: int,
        tangents: dict[int, Tensor],
        seed: Tensor,
        leaves: tuple[Any, ...],
        key: Tensor,
    ) -> list[list[Tensor]]:
        places, seeded = list(tangents), self.run.reads_seed

        def run(given: list[Tensor], fixed: tuple[Any, ...]) -> list[list[Tensor]]:
            own = dict(zip(places, given, strict=False))
            own_seed = given[len(places)] if seeded else seed
            given.clear()
            return program(microbatch, own, own_seed, fixed, self._no_key)

        given = [*tangents.values(), *([seed] if seeded else []), *self._read(leaves)]
        tangents.clear()
        found: list[list[Tensor]] = self._call(kind, microbatch, given, leaves, key, run)
        return found

    def _read(self, leaves: tuple[Any, ...]) -> list[Tensor]:
        """The leaves that the stage reads."""
        return [leaves[i] for i in self.batch]

    def _call(
        self,
        kind: Kind,
        microbatch: int,
        given: list[Tensor],
        leaves: tuple[Any, ...],
        key: Tensor,
        run: Callable[[list[Tensor], tuple[Any, ...]], Any],
    ) -> Any:
        """Replay an action, or capture it.

        Args:
            given: its inputs; the leaves that the stage reads are the last ones.
            run: runs the action on inputs, which it removes from their list, and leaves.
        """
        call = self.index, kind, microbatch
        if self.capture is None:
            known = self.calls[call]
            found = known.replay(given, key)
            self._holds[microbatch] = known.held
            if microbatch in self.stand_ins:
                self.held(microbatch)
            return found
        capture, pool = self.capture, self.capture.pool
        slots = [capture.slot(value) for value in given]
        given.clear()
        inputs = [pool.alias(slot) for slot in slots]
        fixed = list(leaves)
        for place, slot in zip(reversed(self.batch), reversed(slots), strict=False):
            fixed[place] = slot
        generators = GraphGenerators(self.run.device, self.run.draws(kind))
        without = [parameter for parameter in self.run.gradient_memory if parameter.grad is None]
        returned: list[Any] = []
        graph = pool.capture(lambda: returned.append(run(slots, tuple(fixed))), generators)
        outputs = returned.pop()
        capture.own(pytree.tree_leaves(outputs))
        assigned = [(parameter, parameter.grad) for parameter in without if parameter.grad is not None]
        aliases = pytree.tree_map(pool.alias, outputs)
        ignored = self.run.persistent.union(storage_sizes(fixed))
        held = sum(size for key, size in storage_sizes(self.run.held(microbatch)).items() if key not in ignored)
        capture.calls[call] = GraphedCall(graph, inputs, generators, aliases, assigned, held)
        return outputs

    def held(self, microbatch: int) -> list[Any]:
        size = self._holds.get(microbatch, 0)
        stand_in = self.stand_ins[microbatch] = torch.empty(size, dtype=torch.uint8, device="meta")
        return [stand_in]
