"""The measured times of a model on the devices at hand: of operators, of stages, and of messages between devices."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from ...core.capture.export.operators import Operators, tensor_bytes
from ...core.costs.costs import StageCosts
from ...core.costs.graph import OpGraph, OpNode
from ...core.costs.message_overhead import FREE, MessageLine
from ...core.plan.offload import Storage
from ...core.schedules.placement import folded_placement, looped_placement
from ...core.search.problem.blocks import Stages
from ..batch.example import Example
from ..devices.compute import compute_device
from ..launch.progress import Report, silent
from ..launch.team import Team
from ..offload.offloadable import offloadable_storages
from ..optimizer.optimizers import OptimizerFactory, state_share
from ..profile.message_profile import MESSAGES_S, measured_message_line
from ..profile.operator_profile import profile_operators
from ..profile.stage_profile import profile_stages
from ..programs.compiled import compile_stages
from ..programs.options import ProgramOptions


@frozen(slots=False)
class Measurements:
    """Measures a model on all devices at once. All ranks call each method at the same time, and get the same result.

    Args:
        example: the captured step, with a real microbatch. The model is read and never changed.
        team: the devices.
        optimizer: creates each stage's optimizer.
        programs: how stage programs are derived; a pipeline of the same stages need not derive them again.
        report: called with the progress of planning.
        allows: whether there is time for something that takes this many seconds; only messages are left out without.

    Attributes:
        stage_costs: costs of all stages measured so far.
        storages: of these stages, the storages of saved tensors that may leave the device, by stage.
        integers: results of other than floating-point types between operators, once `graph` has run.
    """

    example: Example
    team: Team
    optimizer: OptimizerFactory | None = None
    programs: ProgramOptions = field(factory=ProgramOptions)
    report: Report = silent
    allows: Callable[[str, float], bool] = lambda what, seconds: True
    stage_costs: dict[Stages, tuple[StageCosts, ...]] = field(factory=dict, init=False)
    storages: dict[Stages, tuple[tuple[Storage, ...], ...]] = field(factory=dict, init=False)
    integers: dict[str, Tensor] = field(factory=dict, init=False)

    @property
    def operators(self) -> Operators:
        """The captured step."""
        return self.example.operators

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The model's parameters, by qualified name."""
        return dict(self.example.model.named_parameters())

    @cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        """The model's buffers, by qualified name."""
        return dict(self.example.model.named_buffers())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every parameter."""
        return {name: tensor_bytes(parameter) for name, parameter in self.parameters.items()}

    @cached_property
    def where(self) -> Mapping[int, torch.device]:
        """Device of this process → its torch device."""
        model = compute_device([*self.parameters.values(), *self.buffers.values()])
        return self.team.where or dict.fromkeys(self.team.local, model)

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...] | None:
        """The cluster's devices of each replica; None for one replica."""
        return self.team.mesh.replicas if self.team.replicas > 1 else None

    @cached_property
    def message(self) -> MessageLine:
        """The time that a message costs the devices at its ends, measured at the first call; zero without the time."""
        if not self.allows("measuring what messages cost", MESSAGES_S):
            return FREE
        self.report("measuring what messages cost")
        return measured_message_line(self.team, self.where)

    def graph(self) -> OpGraph:
        """The operator graph with the mean of the times on all devices."""
        graphs = self.team.everywhere(
            lambda device: profile_operators(
                self.operators,
                self.parameters,
                self.buffers,
                self.example.microbatch.leaves,
                device=self.where[device],
                integers=self.integers,
            )
        )
        nodes = zip(*(graph.nodes for graph in graphs), strict=True)
        return self._with_state(evolve(graphs[0], nodes=tuple(_mean_node(same) for same in nodes)))

    def _with_state(self, graph: OpGraph) -> OpGraph:
        """The graph with the bytes of each operator's parameters, gradients and optimizer state.

        The workspace of an operator includes its new gradient, which is added to the accumulated one.
        """
        trained, seen, nodes = 2 + state_share(self.optimizer), set[str](), []
        for node in graph.nodes:
            own = [name for name in node.parameters if name not in seen]
            seen.update(own)
            gradients = {n: self.sizes[n] for n in node.parameters if self.parameters[n].requires_grad}
            size = sum(self.sizes[n] * (trained if n in gradients else 1) for n in own)
            workspace = max([node.workspace_bytes, *gradients.values()])
            part = None if all(n in gradients for n in own) else sum(self.sizes[n] for n in own if n in gradients)
            nodes.append(evolve(node, state_bytes=round(size), workspace_bytes=workspace, trained_bytes=part))
        return evolve(graph, nodes=tuple(nodes))

    def costs_of(self, stages: Stages) -> tuple[StageCosts, ...]:
        """Costs of stages, each from its own programs on a device that may run it, while all devices compute."""
        devices = self.team.size
        chunks = len(stages) // devices
        place = folded_placement(devices, chunks) if chunks == 2 else looped_placement(devices, chunks)
        mine = [i for i in range(len(stages)) if place[i] in self.team.local]
        where = {i: self.where[place[i]] for i in mine}
        # Compiled here and not in each thread: all threads share the cache `known`.
        known, compiler = self.programs.known, self.programs.compiler
        compiled = compile_stages(self.operators, stages, mine, where, compiler, known)

        def measure(device: int) -> dict[int, StageCosts]:
            own = {i: compiled.programs[i] for i in mine if place[i] == device}
            return profile_stages(
                own,
                compiled.layout,
                self.operators,
                self.parameters,
                self.buffers,
                self.example.microbatch.leaves,
                self.optimizer,
                device=self.where[device],
                integers=self.integers,
            )

        found = self.team.everywhere(measure)
        parts = self.team.everywhere(
            lambda device: {i: offloadable_storages(i, compiled, place) for i in mine if place[i] == device}
        )
        self.storages[stages] = tuple(next(part[i] for part in parts if i in part) for i in range(len(stages)))
        costs = tuple(_mean_costs([part[i] for part in found if i in part]) for i in range(len(stages)))
        self.stage_costs[stages] = costs
        return costs


def _mean_node(same: Sequence[OpNode]) -> OpNode:
    return evolve(
        same[0],
        forward_s=statistics.fmean(node.forward_s for node in same),
        backward_input_s=statistics.fmean(node.backward_input_s for node in same),
        backward_weight_s=statistics.fmean(node.backward_weight_s for node in same),
    )


def _mean_costs(same: Sequence[StageCosts]) -> StageCosts:
    """The mean costs of one stage, measured in every replica."""
    return evolve(
        same[0],
        forward_s=statistics.fmean(cost.forward_s for cost in same),
        backward_input_s=statistics.fmean(cost.backward_input_s for cost in same),
        backward_weight_s=statistics.fmean(cost.backward_weight_s for cost in same),
        backward_s=statistics.fmean(cost.full_backward_s for cost in same),
        optimizer_s=statistics.fmean(cost.optimizer_s for cost in same),
    )
