"""What stays the same while cuts and orders are searched: costs, devices, microbatches."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from attrs import field, frozen

from ..cluster import Cluster
from ..costs import StageCosts, StageEdge, stage_costs, stage_edges
from ..graph import OpGraph
from ..partition import stages_of
from ..schedules.decode import Floats
from ..shortcut.path import StageArrays
from .anneal import Place
from .costing import GraphArrays, MachineArrays, cost_stages, fill_fixed, graph_arrays, machine_arrays
from .shapes import Prefix, prefix_of


@frozen
class FixedStages:
    """Stages that are cut and measured already.

    Args:
        stages: names of the operators of each.
        costs: one for each.
        edges: what they send each other.
    """

    stages: tuple[tuple[str, ...], ...]
    costs: tuple[StageCosts, ...]
    edges: tuple[StageEdge, ...]


@frozen(slots=False, eq=False)
class Setting:
    """One way to use a cluster for a step.

    Args:
        graph: operators with their costs for one microbatch on a device of the first kind.
        cluster: all devices.
        microbatches: in a step of one replica.
        positions: the cluster's device at each place of the pipeline.
        limits: bytes that the device at each position may hold.
        kinds: which of ``graphs`` holds the costs of the device at each position.
        graphs: the same operators, with the costs of each kind of device; ``graph`` alone by default.
        parameter_sizes: bytes of each parameter, where they are known.
        reduce: see :class:`MachineArrays`.
        fixed: stages that no search may cut otherwise.
    """

    graph: OpGraph
    cluster: Cluster
    microbatches: int
    positions: tuple[int, ...]
    limits: tuple[float, ...]
    kinds: tuple[int, ...]
    graphs: tuple[OpGraph, ...]
    parameter_sizes: Mapping[str, int] | None = None
    reduce: Floats = field(factory=lambda: np.zeros((2, 0)))
    fixed: FixedStages | None = None

    @property
    def devices(self) -> int:
        """Devices along the pipeline."""
        return len(self.positions)

    @cached_property
    def arrays(self) -> GraphArrays:
        """The graphs for the compiled search."""
        return graph_arrays(self.graphs, self.parameter_sizes)

    @cached_property
    def machine(self) -> MachineArrays:
        """The devices for the compiled search."""
        reduce = self.reduce if self.reduce.size else np.zeros((2, self.devices))
        return machine_arrays(self.cluster, self.positions, self.limits, self.kinds, reduce)

    @cached_property
    def prefix(self) -> Prefix:
        """Compute time before each operator."""
        return prefix_of(self.graph)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """How fast each position's device is, compared to the first kind of device."""
        whole = [prefix_of(graph)[-1] for graph in self.graphs]
        return tuple(whole[0] / whole[kind] if whole[kind] else 1.0 for kind in self.kinds)

    def staged(
        self, cuts: Sequence[int], placement: Sequence[int]
    ) -> tuple[tuple[tuple[str, ...], ...], tuple[StageCosts, ...], tuple[StageEdge, ...]]:
        """Operators, costs and edges of the stages of some cuts; a tied weight's replicas not counted."""
        if self.fixed is not None:
            return self.fixed.stages, self.fixed.costs, self.fixed.edges
        stages = stages_of(self.graph, cuts)
        return stages, self.costs_of(stages, placement), stage_edges(self.graph, stages)

    def costs_of(self, stages: Sequence[Sequence[str]], placement: Sequence[int]) -> tuple[StageCosts, ...]:
        """Costs of stages, each on the kind of device that it is placed on."""
        tables = [stage_costs(graph, stages) for graph in self.graphs]
        return tuple(tables[self.kinds[device]][stage] for stage, device in enumerate(placement))

    def edges(self, stages: int) -> int:
        """The most edges that so many stages may have."""
        most = len(self.arrays.reader) if self.fixed is None else len(self.fixed.edges)
        return min(most, stages * (stages - 1) // 2)

    def fill(self, place: Place, out: StageArrays) -> None:
        """Fill in the costs of a place's stages."""
        if self.fixed is None:
            cost_stages(self.arrays, self.machine, place.placement, place.cuts, place.recompute, out)
        else:
            fill_fixed(self.fixed.costs, self.fixed.edges, place.placement, self.machine, out)

    @cached_property
    def mixes(self) -> bool:
        """Whether a whole backward can be better than its halves next to each other: the gradient leaves later then."""
        return self.fixed is not None and any(
            cost.full_backward_s < cost.backward_input_s + cost.backward_weight_s for cost in self.fixed.costs
        )

    @cached_property
    def bound_s(self) -> float:
        """No step is shorter: the work of all devices together, or one microbatch on the way there and back."""
        if self.fixed is not None:
            return 0.0
        sums = self.arrays.sums[:, :, -1]
        compute = sums[:, :3].sum(axis=1)
        rate = sum(1 / compute[kind] if compute[kind] else np.inf for kind in self.kinds)
        way = np.diff(self.arrays.sums[:, :2], axis=2).min(axis=0).sum()
        return max(self.microbatches / rate, float(way))


def one_setting(
    graph: OpGraph, cluster: Cluster, microbatches: int, limits: Sequence[float], sizes: Mapping[str, int] | None
) -> Setting:
    """Every device of the cluster in its order, all of one kind."""
    count = len(cluster.devices)
    return Setting(
        graph, cluster, microbatches, tuple(range(count)), tuple(limits), (0,) * count, (graph,), sizes
    )  # fmt: skip
