"""A setting: the fixed inputs of a search for cuts and orders (costs, devices, microbatches)."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from attrs import evolve, frozen

from ...cluster.cluster import Cluster
from ...cluster.mesh import least_by_position
from ...costs.costs import StageCosts, StageEdge, stage_costs, stage_edges
from ...costs.graph import OpGraph
from ...costs.message_overhead import FREE, MessageLine, with_message_times
from ...costs.partition import Cuts, boundary_bytes, stages_of
from ...policies.sharding import NONE, graph_slots_bytes, part_of, part_of_gradients, part_of_graph, slots_of_stage
from ...timing.compiled import StageArrays
from .arrangements import Replicas
from .arrays import (
    GRADIENT_BYTES,
    SAVED,
    STATE,
    GraphArrays,
    MachineArrays,
    graph_arrays,
    machine_arrays,
    of_one_replica,
)
from .candidate import Candidate
from .costing import cost_stages, fill_fixed
from .looped_cuts import looped_cuts, prefix_of, spread

RECOMPUTE_FACTOR = 4 / 3
"""Estimated ratio of a step with recomputation to one without: F is about a third of the work."""


@frozen
class FixedStages:
    """Given stages with measured costs.

    Args:
        stages: names of the operators of each.
        costs: of each.
        edges: the messages between them.
        bound_s: a lower bound of the step; 0 if none is known.
    """

    stages: tuple[tuple[str, ...], ...]
    costs: tuple[StageCosts, ...]
    edges: tuple[StageEdge, ...]
    bound_s: float = 0.0


@frozen(slots=False, eq=False)
class Setting:
    """One way to use a cluster for a step.

    Args:
        graphs: the same operators with their costs for one microbatch on each kind of device.
        cluster: all devices.
        replicas: per replica of the model the cluster's device at each position of its pipeline.
        microbatches: in a step of one replica.
        kinds: index into ``graphs`` for each of the cluster's devices.
        memory: bytes that each of the cluster's devices may hold.
        parameter_sizes: bytes of each parameter, if known.
        fixed: given stages; None if the search chooses the cuts.
        reserved_messages: number of median-size messages for which the search reserves memory.
        reserved: further bytes reserved on each of the cluster's devices, for memory that only the oracle counts; empty
            for none.
        message: time that a message takes on the devices at both ends, in addition to its transfer; costs of stages,
            fixed ones too, exclude it.
        contended: whether the search times messages that share links, which takes some fifty times as long.
        shard: what the replicas of every stage share (see ``policies/sharding``).
        sharing: number of consecutive replicas that share it; None for all.
        whole: if they share anything, the setting with the costs of whole stages; this one has those of one replica.
    """

    graphs: tuple[OpGraph, ...]
    cluster: Cluster
    replicas: Replicas
    microbatches: int
    kinds: tuple[int, ...]
    memory: tuple[float, ...]
    parameter_sizes: Mapping[str, int] | None = None
    fixed: FixedStages | None = None
    reserved_messages: int = 0
    reserved: tuple[float, ...] = ()
    message: MessageLine = FREE
    contended: bool = False
    shard: str = NONE
    sharing: int | None = None
    whole: "Setting | None" = None

    def sharded(self, level: str, sharing: int | None = None) -> "Setting":
        """The setting in which the replicas of every stage share this; itself if there is one replica."""
        replicas = sharing or len(self.replicas)
        if level == NONE or replicas == 1:
            return self
        fixed, reserved = self.fixed, self.reserved
        graphs = tuple(part_of_graph(graph, replicas, level) for graph in self.graphs)
        if part_of_gradients(level):  # slots are those of a device
            if fixed is None:
                slots = max(graph_slots_bytes(graph, self.devices) for graph in self.graphs)
            else:
                slots = max(slots_of_stage(cost) for cost in fixed.costs)
            reserved = tuple(size + slots for size in reserved or (0.0,) * len(self.memory))
        if fixed is not None:
            fixed = evolve(fixed, costs=tuple(part_of(cost, replicas, level, slots=False) for cost in fixed.costs))
        return evolve(self, graphs=graphs, fixed=fixed, shard=level, sharing=sharing, whole=self, reserved=reserved)

    @property
    def devices(self) -> int:
        """Devices along the pipeline."""
        return len(self.replicas[0])

    @property
    def graph(self) -> OpGraph:
        """Operators, with the costs of the first kind of device."""
        return self.graphs[0]

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """Bytes that the search may use at each position, in every replica: memory without the reserved bytes."""
        messages = self.reserved_messages * self._boundary_bytes if self.reserved_messages else 0.0
        reserved = self.reserved or (0.0,) * len(self.memory)
        left = [memory - size for memory, size in zip(self.memory, reserved, strict=True)]
        least = least_by_position(left, self.replicas)
        return tuple(limit - messages if limit > messages else 1.0 for limit in least)

    @cached_property
    def slowest(self) -> tuple[int, ...]:
        """Index of the graph at each position: that of the slowest device there over the replicas."""
        whole = [prefix_of(graph)[-1] for graph in self.graphs]
        return tuple(
            max((self.kinds[device] for device in same), key=lambda kind: whole[kind])
            for same in zip(*self.replicas, strict=True)
        )

    @cached_property
    def arrays(self) -> GraphArrays:
        """The graphs for the compiled search."""
        found = graph_arrays(self.graphs, self.parameter_sizes)
        if self.whole is None:
            return found
        return of_one_replica(found, self.whole.arrays, self.sharing or len(self.replicas), self.shard)

    @cached_property
    def machine(self) -> MachineArrays:
        """The devices for the compiled search."""
        return machine_arrays(
            self.cluster,
            self.replicas,
            self.limits,
            self.slowest,
            self.message,
            self.contended,
            self.shard,
            self.sharing,
        )

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each position's device relative to the first kind of device."""
        whole = [prefix_of(graph)[-1] for graph in self.graphs]
        return tuple(whole[0] / whole[kind] if whole[kind] else 1.0 for kind in self.slowest)

    def even_cuts(self, placement: Sequence[int]) -> Cuts:
        """Cuts whose stages have work in proportion to their devices' speeds; with equal speeds, even in each loop."""
        prefix = prefix_of(self.graph)
        chunks, extra = divmod(len(placement), self.devices)
        if len(set(self.speeds)) == 1 and not extra:
            return looped_cuts(prefix, self.devices, chunks)
        return tuple(spread(prefix, 0, len(prefix) - 1, [self.speeds[device] for device in placement]))

    def staged(
        self, cuts: Sequence[int], placement: Sequence[int]
    ) -> tuple[tuple[tuple[str, ...], ...], tuple[StageCosts, ...], tuple[StageEdge, ...]]:
        """Operators, costs and edges of the stages of some cuts, without the copies of tied weights."""
        fixed = self.fixed
        stages = stages_of(self.graph, cuts) if fixed is None else fixed.stages
        costs = self.costs_of(stages, placement) if fixed is None else fixed.costs
        edges = stage_edges(self.graph, stages) if fixed is None else fixed.edges
        if self.message != FREE:
            costs = with_message_times(costs, placement, edges, self.message)
        return stages, costs, edges

    def costs_of(self, stages: Sequence[Sequence[str]], placement: Sequence[int]) -> tuple[StageCosts, ...]:
        """Costs of stages, each on the kind of device that it is placed on."""
        tables = [stage_costs(graph, stages) for graph in self.graphs]
        return tuple(tables[self.slowest[device]][stage] for stage, device in enumerate(placement))

    def edges(self, stages: int) -> int:
        """Upper bound of the edges between ``stages`` stages."""
        most = len(self.arrays.reader) if self.fixed is None else len(self.fixed.edges)
        return min(most, stages * (stages - 1) // 2)

    def fill(self, candidate: Candidate, out: StageArrays) -> None:
        """Fill in the costs of the stages of a candidate."""
        if self.fixed is None:
            cost_stages(self.arrays, self.machine, candidate.placement, candidate.cuts, candidate.recompute, out)
        else:
            fixed = (self.whole or self).fixed
            summed = None if fixed is None else [cost.gradient_bytes for cost in fixed.costs]
            costs, edges = self.fixed.costs, self.fixed.edges
            fill_fixed(costs, edges, candidate.placement, candidate.recompute, self.machine, out, summed)

    @cached_property
    def estimate(self) -> tuple[bool, float]:
        """Whether memory is too small for any schedule, and an estimate of the step time: the order of searching.

        Computed for 1F1B with two stages per device, even cuts, and the gradient reductions at the end.
        """
        totals, devices, limit = self.arrays.sums[:, :, -1], self.devices, sum(self.limits)
        compute = totals[:, :3].sum(axis=1)
        pace = 1 / max(sum(1 / compute[kind] for kind in self.slowest if compute[kind]), 1e-300)
        state, saved = float(totals[:, STATE].max()), float(totals[:, SAVED].max())
        boundary = self._boundary_bytes
        hops = [
            self.machine.latency[a, b] + boundary / self.machine.rate[a, b] for a, b in pairwise(range(devices))
        ]  # fmt: skip
        machine = self.machine
        moved = [rates for rates in (machine.scatter, machine.gather) if rates.size]
        least, each = sum(moved, machine.reduce).max(axis=1)
        held = state + min(devices, self.microbatches) * saved
        work_s = (RECOMPUTE_FACTOR if held > limit else 1.0) * pace * (self.microbatches + (devices - 1) / 2)
        gradients = float((self.whole or self).arrays.sums[0, GRADIENT_BYTES, -1]) / devices
        return state + boundary * devices > limit, work_s + 2 * sum(hops) + float(least + gradients * each)

    @cached_property
    def _boundary_bytes(self) -> float:
        """Bytes of the tensors that cross a cut, median over all positions."""
        return float(np.median(boundary_bytes(self.graph)))

    @cached_property
    def mixes(self) -> bool:
        """Whether B can be faster than I directly followed by W; with B the gradient is sent later."""
        return self.fixed is not None and any(
            cost.full_backward_s < cost.backward_input_s + cost.backward_weight_s for cost in self.fixed.costs
        )

    @cached_property
    def bound_s(self) -> float:
        """A lower bound of the step: the total work over all devices, or one microbatch's forward and backward."""
        if self.fixed is not None:
            return self.fixed.bound_s
        sums = self.arrays.sums[:, :, -1]
        compute = sums[:, :3].sum(axis=1)
        rate = sum(1 / compute[kind] if compute[kind] else np.inf for kind in self.slowest)
        way = np.diff(self.arrays.sums[:, :2], axis=2).min(axis=0).sum()
        return max(self.microbatches / rate, float(way))


def one_setting(
    graph: OpGraph,
    cluster: Cluster,
    microbatches: int,
    limits: Sequence[float],
    sizes: Mapping[str, int] | None,
    replicas: Replicas | None = None,
    message: MessageLine = FREE,
) -> Setting:
    """The setting for devices of one kind; by default all in their order in one pipeline.

    Args:
        microbatches: in a step of one replica.
        limits, sizes: see :class:`Setting`.
        replicas: per replica the cluster's device at each position.
        message: time that a message takes on the devices at both ends.
    """
    count = len(cluster.devices)
    places = replicas or (tuple(range(count)),)
    return Setting((graph,), cluster, places, microbatches, (0,) * count, tuple(limits), sizes, message=message)
