"""Runs a cut graph on threads: the call of the model runs the plan's forwards, the loss's backward its backwards.

Each half of the plan has its own messages. Between them the stages hold their saved tensors. Several calls of the model
may come before their backwards, so each pass has its own devices (`DevicePool`).
In a stage F runs the graph under autograd, autograd computes B, and the autograd graph holds the saved tensors.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, fx

from ...core.actions import Kind
from ...core.capture.graph.randomness import KeyedRandom, random_key
from ...core.errors import RequestError
from ..devices.compute import HostQueue
from ..engine.executor import BoundActions, Executor
from ..engine.step_data import StepInputs, StepOptions
from ..engine.tied import TiedReduction
from ..launch.team import ThreadTeam
from ..programs.linked_stage import LinkedStage
from ..update.stage_state import StageState
from ..update.update import Ending, NormParameters, Update
from .cutting import CutGraph

_FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})
_BACKWARD = frozenset({Kind.B, Kind.SEND_B, Kind.RECV_B})


@frozen
class _Piece:
    """A microbatch.

    Args:
        leaves: the graph's arguments, with the microbatch's rows of those that are cut.
    """

    leaves: tuple[Any, ...]


class _Devices:
    """The devices, with both halves of the plan bound, for one pass at a time.

    Args:
        gradients: whether a backward follows.
    """

    def __init__(self, graph: CutGraph, gradients: bool) -> None:
        devices, microbatches = range(len(graph.stages)), range(len(graph.sizes))
        self.team = ThreadTeam(len(devices))
        self.shared = [StagePass() for _ in devices]
        self._runs = [[{d: GraphStage(graph, d, m, gradients, self.shared[d])} for m in microbatches] for d in devices]
        self._lowered = graph.lowered(gradients)
        self._executors: dict[int, Executor] = {}
        self._bound: dict[tuple[int, frozenset[Kind]], BoundActions] = {}

    def run(self, device: int, kinds: frozenset[Kind], inputs: StepInputs) -> dict[tuple[str, int], Tensor]:
        """Run half of the plan on a device. Returns its results by (name, microbatch)."""
        plan, backend = self._lowered.plan, self.team.backend(device)
        if device not in self._executors:
            update = Update(plan, {}, NormParameters(()), None, torch.device("cpu"))
            self._executors[device] = Executor(plan, backend, HostQueue(), TiedReduction(plan, {}), update)
        executor = self._executors[device]
        executor.backend = backend
        if (device, kinds) not in self._bound:
            half = tuple(tuple(a for a in actions if a.kind in kinds) for actions in self._lowered.lowered)
            self._bound[device, kinds] = executor.bind(evolve(self._lowered, lowered=half), self._runs[device])
        return executor.run(self._bound[device, kinds], inputs, StepOptions(Ending.KEEP)).results

    def clear(self) -> None:
        """Free the tensors of the last pass."""
        for shared in self.shared:
            shared.arguments, shared.wanted, shared.gradients = {}, {}, {}


@frozen(eq=False)
class DevicePool:
    """Devices for passes of one cut graph, reused between them."""

    graph: CutGraph
    _idle: dict[bool, list[_Devices]] = field(factory=lambda: {False: [], True: []}, init=False)

    def lend(self, gradients: bool) -> _Devices:
        """Devices that run no pass now."""
        idle = self._idle[gradients]
        return idle.pop() if idle else _Devices(self.graph, gradients)

    def take_back(self, devices: _Devices, gradients: bool) -> None:
        """Keep devices whose pass ended without a failure."""
        devices.clear()
        self._idle[gradients].append(devices)


@define(eq=False)
class Pass:
    """One forward and its backward.

    Args:
        pool: the devices.
        arguments: of the graph.
        gradients: whether a backward follows.
        key: of the random numbers of this pass.
    """

    pool: DevicePool
    arguments: Sequence[Any]
    gradients: bool
    key: tuple[int, int] = (0, 0)
    _devices: _Devices | None = None

    @property
    def graph(self) -> CutGraph:
        """The cut graph."""
        return self.pool.graph

    def forward(self) -> list[Tensor]:
        """Run all forwards. Returns the graph's outputs for the whole batch."""
        kind = next(value.device.type for value in self.arguments if isinstance(value, Tensor))
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        devices, inputs, graph = self.pool.lend(self.gradients), self._inputs(), self.graph

        def work(number: int) -> dict[tuple[str, int], Tensor]:
            with torch.autocast(kind, dtype, enabled=enabled):
                return devices.run(number, _FORWARD, inputs)

        results = devices.team.run_local(work)
        outputs = [
            torch.cat([results[graph.sources[node]][node.name, m] for m in range(len(graph.sizes))])
            for node in graph.outputs
        ]
        for own in results.values():
            own.clear()
        if self.gradients:
            self._devices = devices
        else:
            self.pool.take_back(devices, False)
        return outputs

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run all backwards.

        Args:
            gradients: of the outputs, for the whole batch.

        Returns:
            The gradient of each argument; None for those without one.

        Raises:
            RequestError: it was called before.
        """
        devices, self._devices = self._devices, None
        if devices is None:
            raise RequestError(
                "backward is called a second time, but panpipe has freed the saved tensors: call the model again"
            )
        wanted = dict(zip(self.graph.outputs, gradients, strict=True))
        for shared in devices.shared:
            shared.wanted = wanted
        inputs = self._inputs()
        devices.team.run_local(lambda number: devices.run(number, _BACKWARD, inputs))
        by_stage = [shared.gradients for shared in devices.shared]
        self.pool.take_back(devices, True)
        return [self._gradient(place, by_stage) for place in range(len(self.arguments))]

    def _inputs(self) -> StepInputs:
        pieces, keys, start = [], list[Tensor](), 0
        with torch.inference_mode(False), torch.no_grad():
            for number, size in enumerate(self.graph.sizes):
                rows = (self._rows(place, value, start, size) for place, value in enumerate(self.arguments))
                pieces.append(_Piece(tuple(rows)))
                keys.append(random_key(*self.key, number))
                start += size
        count = len(pieces)
        return StepInputs(pieces, keys, torch.zeros(count), [None] * count, clear_gradients=False)

    def _rows(self, place: int, value: Any, start: int, size: int) -> Any:
        if place not in self.graph.batched:
            return value
        if not isinstance(value, Tensor):
            return size
        return value.detach().narrow(0, start, size).requires_grad_(value.requires_grad)

    def _gradient(self, place: int, by_stage: Sequence[Mapping[int, list[Tensor | None]]]) -> Tensor | None:
        parts = [one[place] for one in by_stage if place in one]
        sums = [_sum(row) for row in zip(*parts, strict=True)]
        if not sums or all(one is None for one in sums):
            return None
        if place not in self.graph.batched:
            return sums[0]
        value = self.arguments[place]
        pieces = value.detach().split(list(self.graph.sizes))
        return torch.cat([dense(one, piece) for one, piece in zip(sums, pieces, strict=True)])


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    defined = [gradient for gradient in gradients if gradient is not None]
    total = defined[0] if defined else None
    for gradient in defined[1:]:
        total = gradient if total is None else total + gradient
    return total


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
        number: the stage.
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
