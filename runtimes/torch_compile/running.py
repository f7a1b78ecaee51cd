"""Running a graph: a plan of all forwards, then all backwards, for the executor. Its F and B are autograd's.

    model(x)           device 0   F0 F1 F2 F3                  loss.backward()   device 0            B0 B1 B2 B3
                       device 1      F0 F1 F2 F3                                 device 1   B0 B1 B2 B3

The loss is the user's, and lies between: the call of the model runs the plan's forwards, the loss's backward its
backwards. Each half has its messages to itself; from one to the other the stages hold their saved tensors. Without
gradients the plan is one of forwards alone.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx

from ...core.actions import Kind
from ...core.capture.graph.randomness import random_key
from ...core.capture.programs.stage import Boundary
from ...core.cluster.mesh import Mesh
from ...core.errors import RequestError
from ...core.plan import plan as plans
from ...core.plan.derive import forward_only
from ...core.schedules.gpipe import gpipe
from ...core.schedules.problem import ScheduleProblem
from ..devices.compute import HostQueue
from ..engine.executor import Bound, Executor
from ..engine.lowered_plan import LoweredPlan, lowered_plan
from ..engine.step_data import StepInputs, StepOptions
from ..engine.tied import TiedReduction
from ..launch.team import ThreadTeam
from ..optimizer.update import Ending, NormParameters, Update
from ..programs.linked_stage import Layout
from .cutting import Stage
from .graph_stage import GraphStage, StagePass, dense
from .seen import Seen

_FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})
_BACKWARD = frozenset({Kind.B, Kind.SEND_B, Kind.RECV_B})


@frozen(eq=False, slots=False)
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
    _idle: dict[bool, list["_Pipeline"]] = field(factory=lambda: {False: [], True: []})

    @cached_property
    def sources(self) -> Mapping[fx.Node, int]:
        """The stage that gives each node that any stage gives."""
        return {node: number for number, stage in enumerate(self.stages) for node in stage.outgoing}

    def orders(self, gradients: bool) -> LoweredPlan:
        """The plan, and what its devices issue."""
        schedule = gpipe(ScheduleProblem(len(self.stages), len(self.sizes)))
        stages = (
            plans.Stage(number, number, tuple(node.name for node in stage.outgoing))
            for number, stage in enumerate(self.stages)
        )
        plan = plans.Plan(
            "torch.compile", "", Mesh(len(self.stages)), len(self.sizes), schedule.name, tuple(stages), (),
            schedule.device_actions,
        )  # fmt: skip
        return lowered_plan(
            plan if gradients else forward_only(plan), [self.layout(size, gradients) for size in self.sizes]
        )

    def layout(self, size: int, gradients: bool) -> Layout:
        """The messages between stages for a microbatch of ``size`` samples."""
        return {
            (src, dst): tuple(self.boundary(node, size, gradients) for node in sent)
            for dst, reader in enumerate(self.stages)
            for src, sender in enumerate(self.stages[:dst])
            if (sent := [node for node in sender.outgoing if node in reader.incoming])
        }

    def boundary(self, node: fx.Node, size: int, gradients: bool) -> Boundary:
        """A node that a stage gives to another."""
        seen = self.seen[size][node]
        return Boundary(node.name, seen.shape, seen.dtype, gradients and seen.differentiable)

    def lend(self, gradients: bool) -> "_Pipeline":
        """One that runs no pass now: several calls may be before their backwards."""
        idle = self._idle[gradients]
        return idle.pop() if idle else _Pipeline(self, gradients)

    def take_back(self, pipeline: "_Pipeline", gradients: bool) -> None:
        """Keep one whose pass ended without a failure."""
        pipeline.clear()
        self._idle[gradients].append(pipeline)


@frozen
class _Piece:
    """A microbatch.

    Args:
        leaves: the graph's arguments, with the microbatch's rows of those that are cut.
    """

    leaves: tuple[Any, ...]


class _Pipeline:
    """The devices, with both halves of the plan bound: for one pass at a time.

    Args:
        work: what is run.
        gradients: whether a backward follows.
    """

    def __init__(self, work: Work, gradients: bool) -> None:
        devices, microbatches = range(len(work.stages)), range(len(work.sizes))
        self.team = ThreadTeam(len(devices))
        self.shared = [StagePass() for _ in devices]
        self._runs = [[{d: GraphStage(work, d, m, gradients, self.shared[d])} for m in microbatches] for d in devices]
        self._orders = work.orders(gradients)
        self._executors: dict[int, Executor] = {}
        self._bound: dict[tuple[int, frozenset[Kind]], Bound] = {}

    def run(self, device: int, kinds: frozenset[Kind], inputs: StepInputs) -> dict[tuple[str, int], Tensor]:
        """Run a half of the plan on a device; its results."""
        plan, backend = self._orders.plan, self.team.backend(device)
        if device not in self._executors:
            update = Update(plan, {}, NormParameters(()), None, torch.device("cpu"))
            self._executors[device] = Executor(plan, backend, HostQueue(), TiedReduction(plan, {}), update)
        executor = self._executors[device]
        executor.backend = backend
        if (device, kinds) not in self._bound:
            half = tuple(tuple(a for a in actions if a.kind in kinds) for actions in self._orders.lowered)
            bound = executor.bind(plan, half, self._runs[device], self._orders.ahead_limit)
            self._bound[device, kinds] = bound
        return executor.run(self._bound[device, kinds], inputs, StepOptions(Ending.KEEP)).results

    def clear(self) -> None:
        """Free what a pass left."""
        for shared in self.shared:
            shared.arguments, shared.wanted, shared.gradients = {}, {}, {}


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
    _pipeline: _Pipeline | None = None

    def _inputs(self) -> StepInputs:
        pieces, keys, start = [], list[Tensor](), 0
        with torch.inference_mode(False), torch.no_grad():
            for number, size in enumerate(self.work.sizes):
                rows = (self._rows(place, value, start, size) for place, value in enumerate(self.arguments))
                pieces.append(_Piece(tuple(rows)))
                keys.append(random_key(*self.key, number))
                start += size
        count = len(pieces)
        return StepInputs(pieces, keys, torch.zeros(count), [None] * count, clear_gradients=False)

    def _rows(self, place: int, value: Any, start: int, size: int) -> Any:
        if place not in self.work.batched:
            return value
        if not isinstance(value, Tensor):
            return size
        return value.detach().narrow(0, start, size).requires_grad_(value.requires_grad)

    def forward(self) -> list[Tensor]:
        """All forwards. Returns the graph's outputs for the whole batch."""
        device = next(value.device.type for value in self.arguments if isinstance(value, Tensor))
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        pipeline, inputs = self.work.lend(self.gradients), self._inputs()

        def work(number: int) -> dict[tuple[str, int], Tensor]:
            with torch.autocast(device, dtype, enabled=enabled):
                return pipeline.run(number, _FORWARD, inputs)

        found = pipeline.team.run_local(work)
        outputs = [
            torch.cat([found[self.work.sources[node]][node.name, m] for m in range(len(self.work.sizes))])
            for node in self.work.outputs
        ]
        for results in found.values():
            results.clear()
        if self.gradients:
            self._pipeline = pipeline
        else:
            self.work.take_back(pipeline, False)
        return outputs

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All backwards.

        Args:
            gradients: of the outputs, for the whole batch.

        Returns:
            Of the arguments; None for those without one.

        Raises:
            RequestError: a second time.
        """
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            raise RequestError(
                "backward runs a second time and panpipe has let go of the saved tensors: call the model again"
            )
        wanted = dict(zip(self.work.outputs, gradients, strict=True))
        for shared in pipeline.shared:
            shared.wanted = wanted
        inputs = self._inputs()
        pipeline.team.run_local(lambda number: pipeline.run(number, _BACKWARD, inputs))
        found = [shared.gradients for shared in pipeline.shared]
        self.work.take_back(pipeline, True)
        return [self._gradient(place, found) for place in range(len(self.arguments))]

    def _gradient(self, place: int, found: Sequence[Mapping[int, list[Tensor | None]]]) -> Tensor | None:
        parts = [one[place] for one in found if place in one]
        sums = [_sum(row) for row in zip(*parts, strict=True)]
        if not sums or all(one is None for one in sums):
            return None
        if place not in self.work.batched:
            return sums[0]
        value = self.arguments[place]
        pieces = value.detach().split(list(self.work.sizes))
        return torch.cat([dense(one, piece) for one, piece in zip(sums, pieces, strict=True)])


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    there = [gradient for gradient in gradients if gradient is not None]
    total = there[0] if there else None
    for gradient in there[1:]:
        total = gradient if total is None else total + gradient
    return total
