"""Speeds of the devices along the pipeline, from rehearsed steps, and plans for devices with these speeds."""

import statistics
from collections.abc import Sequence

from attrs import evolve, frozen

from ...core.actions import COMPUTE_KINDS, Kind
from ...core.costs.costs import StageCosts, stage_costs, stage_edges
from ...core.costs.graph import OpGraph
from ...core.costs.message_overhead import MessageLine, with_message_times
from ...core.plan.plan import Plan
from ...core.search import Oracle
from ...core.trace.trace import Trace
from ..planning.rehearsed import times_scaled
from ..profile.corrected_operators import corrected_graph

EQUALLY_FAST = 0.1
"""Devices whose times differ by less than this share are taken as equally fast: rehearsals vary as much."""


def slowness(plan: Plan, base: Sequence[StageCosts], traces: Sequence[Trace]) -> tuple[float, ...]:
    """How much longer each device takes than the fastest one for the same work: 1 or more.

    Args:
        plan: that ran.
        base: costs of its stages on devices of equal speed.
        traces: of its steps, over all replicas; in each position the slowest replica counts.
    """
    took: dict[tuple[int, int, Kind], list[float]] = {}
    for trace in traces:
        for event in trace.events:
            if event.action.kind in COMPUTE_KINDS:
                key = event.device, event.action.stage, event.action.kind
                took.setdefault(key, []).append(event.end_s - event.start_s)
    measured, expected = [0.0] * plan.mesh.ranks, [0.0] * plan.mesh.ranks
    for (rank, stage, kind), times in took.items():
        measured[rank] += statistics.median(times)
        expected[rank] += _expected(base[stage], kind)
    ratios = [m / e if e > 0 else 1.0 for m, e in zip(measured, expected, strict=True)]
    by_position = [max(ratios[device :: plan.devices]) for device in range(plan.devices)]
    least = min(by_position)
    found = [ratio / least if least > 0 else 1.0 for ratio in by_position]
    return tuple(found) if max(found) > 1 + EQUALLY_FAST else (1.0,) * plan.devices


def _expected(cost: StageCosts, kind: Kind) -> float:
    return {
        Kind.F: cost.forward_s,
        Kind.B: cost.full_backward_s,
        Kind.I: cost.backward_input_s,
        Kind.W: cost.backward_weight_s,
    }[kind]


@frozen
class SlowedDevices:
    """The operators on devices of different speeds.

    Args:
        graph: operators with their times on the fastest device.
        slowness: of each device along the pipeline.
    """

    graph: OpGraph
    slowness: tuple[float, ...]

    @classmethod
    def of(cls, graph: OpGraph, plan: Plan, costs: Sequence[StageCosts], slowness: Sequence[float]) -> "SlowedDevices":
        """The operators, by the measured costs of the stages of a plan.

        Args:
            graph: with measured times, whose proportions within a stage count.
            plan: has the stages.
            costs: of its stages, each as measured on its device.
            slowness: of each device.
        """
        fast = [times_scaled([cost], 1 / slowness[s.device])[0] for s, cost in zip(plan.stages, costs, strict=True)]
        return cls(corrected_graph(graph, [stage.nodes for stage in plan.stages], fast), tuple(slowness))

    @property
    def graphs(self) -> tuple[OpGraph, ...]:
        """The operators with their times on each device."""
        return tuple(slowed(self.graph, factor) for factor in self.slowness)

    def step_s(self, plan: Plan, message: MessageLine, oracle: Oracle) -> float:
        """The predicted step of a plan on these devices, in seconds.

        Args:
            plan: with a prediction, whose cluster counts.
            message: the time that a message takes of the devices at its ends.
            oracle: predicts a step.
        """
        stages = [stage.nodes for stage in plan.stages]
        tables = [stage_costs(graph, stages) for graph in self.graphs]
        own = [tables[stage.device][stage.index] for stage in plan.stages]
        costs = with_message_times(own, plan.placement, stage_edges(self.graph, stages), message)
        return oracle(evolve(plan, prediction=None), tuple(costs), plan.predicted.cluster).step_s


def slowed(graph: OpGraph, factor: float) -> OpGraph:
    """The graph with the times of all operators multiplied by ``factor``."""
    return evolve(
        graph,
        nodes=tuple(
            evolve(
                node,
                forward_s=node.forward_s * factor,
                backward_input_s=node.backward_input_s * factor,
                backward_weight_s=node.backward_weight_s * factor,
                optimizer_s=node.optimizer_s * factor,
            )
            for node in graph.nodes
        ),
    )
