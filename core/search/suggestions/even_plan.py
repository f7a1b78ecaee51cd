"""Plans that need no costs: stages with equal numbers of operators. For checks, in which every cut must be correct."""

import itertools
from collections.abc import Mapping

from ...costs.graph import OpGraph
from ...errors import RequestError
from ...plan.plan import Plan
from ...schedules.problem import Schedule
from ..problem.assemble import assemble


def even_plan(graph: OpGraph, schedule: Schedule, parameter_sizes: Mapping[str, int]) -> Plan:
    """A plan whose stages have equal numbers of operators, up to rounding, in the graph's order.

    Args:
        graph: the operators of the training step.
        schedule: placement and compute order.
        parameter_sizes: bytes of each parameter.

    Raises:
        RequestError: there are fewer operators than stages.
    """
    names, stages = [node.name for node in graph.nodes], len(schedule.placement)
    if stages > len(names):
        raise RequestError(
            f"there are {stages} stages for {len(names)} operators: a stage needs at least one; use fewer devices or "
            "fewer stages on each"
        )
    cuts = [round(i * len(names) / stages) for i in range(stages + 1)]
    parts = [names[a:b] for a, b in itertools.pairwise(cuts)]
    return assemble(graph, parts, schedule, parameter_sizes=parameter_sizes)
