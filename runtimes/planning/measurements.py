"""The measured times of a model on the devices at hand: of operators, of stages, and of messages between devices."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from attrs import define, evolve, field
from torch import Tensor, nn

from ...core.capture.export.operators import Operators, tensor_bytes
from ...core.capture.programs.stage_programs import StagePrograms
from ...core.cluster.cluster import Cluster
from ...core.cluster.routing import path_latency_s, path_rate
from ...core.costs.costs import StageCosts, stage_costs
from ...core.costs.graph import OpGraph, OpNode
from ...core.costs.message_overhead import FREE, MessageLine
from ...core.plan.memory_policy import Storage
from ...core.schedules.problem import folded_placement, looped_placement
from ...core.search.problem.blocks import Stages
from ..batch.example import Example
from ..devices.compute import Stopwatch, compute_device
from ..launch.team import Team
from ..offload.offloads import offloadable_storages
from ..profile.operator_profile import profile_operators
from ..programs.compiled import compile_stages
from ..programs.stage_compiler import ProgramOptions
from ..update.optimizers import OptimizerFactory, stage_optimizer, state_share

TIMES = ("forward_s", "backward_input_s", "backward_weight_s")
"""The measured times of an operator."""
OPTIMIZER_STEPS, OPTIMIZER_BYTES = 3, 16 << 20
"""Timed steps of an optimizer, after one that creates its state, and the bytes of parameters that it steps."""


@define(slots=False, eq=False)
class Measurements:
    """Measures a model on all devices at once. All ranks call each method at the same time, and get the same result.

    Args:
        example: the captured step, with a real microbatch. The model is read and never changed.

    Attributes:
        costs: results of `costs_of` so far.
        storages: of stages whose programs are known, the storages of saved tensors that may leave the device, by stage.
    """

    example: Example
    team: Team
    optimizer: OptimizerFactory | None = None
    programs: ProgramOptions = field(factory=ProgramOptions)
    costs: dict[Stages, tuple[StageCosts, ...]] = field(factory=dict, init=False)
    storages: dict[Stages, tuple[tuple[Storage, ...], ...]] = field(factory=dict, init=False)
    _graph: OpGraph | None = field(default=None, init=False)

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

    def message(self, cluster: Cluster) -> MessageLine:
        """The time that a message costs the devices at its ends, on a machine.

        On a CPU, whose cores move it, that is about as long as it is on its way between the first two devices. The copy
        engines of GPUs move messages while these compute.
        """
        if len(cluster.devices) == 1 or any(device.type != "cpu" for device in self.where.values()):
            return FREE
        path = cluster.path(0, 1)
        return MessageLine(path_latency_s(path), 1 / path_rate(path))

    def graphs(self) -> list[OpGraph]:
        """The operator graph with the times on each device, measured by all of them at once."""
        given = self.operators, self.parameters, self.buffers, self.example.microbatch.leaves
        return self.team.everywhere(lambda device: profile_operators(*given, device=self.where[device]))

    def graph(self, graphs: Sequence[OpGraph] = ()) -> OpGraph:
        """The operator graph with the shortest of the times on all devices: noise only makes them longer.

        Args:
            graphs: of `graphs`; measured if there are none.
        """
        graphs = graphs or self.graphs()
        nodes = zip(*(graph.nodes for graph in graphs), strict=True)
        self._graph = self._with_state(evolve(graphs[0], nodes=tuple(_fastest_node(same) for same in nodes)))
        return self._graph

    @property
    def measured(self) -> OpGraph:
        """The last result of `graph`, which is called first if it has not been."""
        return self.graph() if self._graph is None else self._graph

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

    def costs_of(self, stages: Stages, *, derive: bool = False) -> tuple[StageCosts, ...]:
        """Costs of stages: the sums of their operators.

        Args:
            derive: whether memory is that of the stages' own programs, which are compiled then.
        """
        rate, share, graph = self.optimizer_s_per_byte, state_share(self.optimizer), self.measured
        found = []
        for cost, names in zip(stage_costs(graph, stages), stages, strict=True):
            own = {parameter for name in names for parameter in graph.nodes[graph.index[name]].parameters}
            trained = [self.sizes[name] for name in own if self.parameters[name].requires_grad]
            found.append(evolve(
                cost, optimizer_s=rate * sum(trained), parameter_bytes=sum(self.sizes[name] for name in own),
                gradient_bytes=sum(trained), optimizer_bytes=round(sum(trained) * share),
                largest_gradient_bytes=max(trained, default=0),
            ))  # fmt: skip
        if derive:
            devices = self.team.size
            chunks = len(stages) // devices
            place = folded_placement(devices, chunks) if chunks == 2 else looped_placement(devices, chunks)
            found = list(self.derived_costs(found, stages, place))
        self.costs[stages] = tuple(found)
        return self.costs[stages]

    def derived_costs(
        self, costs: Sequence[StageCosts], stages: Sequence[Sequence[str]], place: Sequence[int]
    ) -> tuple[StageCosts, ...]:
        """Costs of stages with the memory of their programs, which are compiled if they are not known.

        Args:
            costs: with times.

        Raises:
            RequestError: on all ranks, if a stage has no valid programs.
        """
        mine = [i for i in range(len(stages)) if place[i] in self.team.local]
        where = {i: self.where[place[i]] for i in mine}
        # Compiled here and not in each thread: all threads share the cache `known`.
        with self.team.agreeing():
            compiler = None if self.programs.compiler is None else self.programs.compiler.programs
            compiled = compile_stages(self.operators, stages, mine, where, compiler, self.programs.known)
        own = {i: _with_memory(costs[i], i, compiled.programs[i]) for i in mine}
        parts = self.team.everywhere(
            lambda device: {i: (own[i], offloadable_storages(i, compiled, place)) for i in mine if place[i] == device}
        )
        found = [next(part[i] for part in parts if i in part) for i in range(len(stages))]
        self.storages[tuple(map(tuple, stages))] = tuple(storages for _, storages in found)
        return tuple(cost for cost, _ in found)

    @cached_property
    def optimizer_s_per_byte(self) -> float:
        """Seconds of an optimizer step for each byte of parameters, measured by all devices at the first call."""
        return min(self.team.everywhere(lambda device: self._optimizer_rate(self.where[device])))

    def _optimizer_rate(self, device: torch.device) -> float:
        shapes = [p.shape for p in self.parameters.values() if p.requires_grad and p.is_floating_point()]
        sample, left = list[nn.Parameter](), OPTIMIZER_BYTES
        for shape in shapes:
            sample.append(nn.Parameter(torch.full(shape, 0.5, device=device)))
            left -= sample[-1].nbytes
            if left <= 0:
                break
        named = [(f"{number}", parameter) for number, parameter in enumerate(sample)]
        try:
            made = None if self.optimizer is None or not named else stage_optimizer(self.optimizer, named)
        except Exception:  # it needs the parameters' own names: the first steps of training measure it
            made = None
        if made is None:
            return 0.0
        for parameter in sample:
            # Not zeros: with them a step of AdamW takes twice as long as with other values (torch 2.13, CPU).
            parameter.grad = torch.full_like(parameter, 1e-3)
        watch, spans = Stopwatch(device), []
        with watch.active():
            for _ in range(1 + OPTIMIZER_STEPS):
                start = watch.now()
                made.step()
                spans.append((start, watch.now()))
            return min(watch.between(*span) for span in spans[1:]) / sum(parameter.nbytes for parameter in sample)


def _with_memory(cost: StageCosts, index: int, programs: StagePrograms) -> StageCosts:
    memory, (first, second) = programs.memory, (cost.backward_input_s, cost.backward_weight_s)
    if programs.backward_input is None or programs.backward_weight is None:  # then I or W runs the whole backward
        first, second = (first + second, 0.0) if index else (0.0, first + second)
    return evolve(
        cost, backward_input_s=first, backward_weight_s=second, saved_bytes=memory.saved,
        freed_by_input_bytes=memory.freed_by_input, created_by_input_bytes=memory.created_by_input,
        workspace_bytes=memory.workspace, input_bytes=memory.inputs, shared_bytes=memory.shared,
    )  # fmt: skip


def _fastest_node(same: Sequence[OpNode]) -> OpNode:
    return evolve(same[0], **{name: min(getattr(node, name) for node in same) for name in TIMES})
