"""Speeds of the devices along the pipeline, from profiles that all of them measure at once, and operators at these."""

from collections.abc import Sequence

from attrs import evolve, frozen

from ...core.costs.costs import stage_costs, stage_edges
from ...core.costs.graph import OpGraph
from ...core.costs.message_overhead import MessageLine, with_message_times
from ...core.plan.plan import Plan
from ...core.search import Oracle

EQUALLY_FAST = 0.1
"""Devices whose times differ by less than this share are taken as equally fast: profiles vary as much."""


def slowness(graphs: Sequence[OpGraph], devices: int) -> tuple[float, ...]:
    """How much longer each device along the pipeline takes than the fastest one for the same work: 1 or more.

    Args:
        graphs: the operators as each device measured them, replica by replica; the slowest replica counts.
        devices: along the pipeline.
    """
    took = [sum(n.forward_s + n.backward_input_s + n.backward_weight_s for n in graph.nodes) for graph in graphs]
    by_position = [max(took[device::devices]) for device in range(devices)]
    least = min(by_position)
    found = [seconds / least if least > 0 else 1.0 for seconds in by_position]
    return tuple(found) if max(found) > 1 + EQUALLY_FAST else (1.0,) * devices


@frozen
class SlowedDevices:
    """The operators on devices of different speeds.

    Args:
        graph: operators with their times on the fastest device.
        slowness: of each device along the pipeline.
    """

    graph: OpGraph
    slowness: tuple[float, ...]

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
