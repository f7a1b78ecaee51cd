"""Build a plan from stages and a schedule."""

import itertools
from collections.abc import Mapping, Sequence

from attrs import evolve

from ...cluster.mesh import Mesh
from ...costs.costs import StageCosts, StageEdge, stage_edges
from ...costs.graph import OpGraph
from ...errors import RequestError
from ...plan.plan import Plan, Stage, TiedWeight
from ...schedules.problem import Schedule


def assemble(
    graph: OpGraph,
    stages: Sequence[Sequence[str]],
    schedule: Schedule,
    *,
    parameter_sizes: Mapping[str, int] | None = None,
    edges: tuple[StageEdge, ...] | None = None,
) -> Plan:
    """The plan, without a prediction.

    Args:
        schedule: placement and compute order.
        parameter_sizes: bytes of each parameter; needed for those that several stages read. If None, the size is that
            of an operator that reads only this parameter.
        edges: by default computed from the graph.

    Raises:
        RequestError: the schedule is for another number of stages, a node is in no stage or in two, or the size of a
            tied weight is not known.
    """
    if len(stages) != len(schedule.placement):
        raise RequestError(
            f"schedule {schedule.name} places {len(schedule.placement)} stages and the partition has {len(stages)}: "
            "build it for that many"
        )
    edges = stage_edges(graph, stages) if edges is None else edges
    parameters = [_parameters(graph, names) for names in stages]
    return Plan(
        model=graph.name,
        graph_hash=graph.hash,
        mesh=Mesh(len(schedule.device_actions)),
        microbatches=schedule.microbatches,
        schedule=schedule.name,
        stages=tuple(
            Stage(index, schedule.placement[index], tuple(names), parameters[index])
            for index, names in enumerate(stages)
        ),
        edges=edges,
        device_actions=schedule.device_actions,
        tied=_tied(graph, parameters, parameter_sizes),
    )


def with_replicas(graph: OpGraph, costs: tuple[StageCosts, ...], tied: Sequence[TiedWeight]) -> tuple[StageCosts, ...]:
    """Costs with the state of every copy of a tied weight.

    A graph counts a parameter at the first operator that reads it. Each further stage holds a copy of it, if it is
    trained with a gradient, and with optimizer state in the graph's proportion.
    """
    if not tied:
        return costs
    share = replica_share(graph)
    result = list(costs)
    for weight in tied:
        for stage in weight.stages[1:]:
            cost = evolve(result[stage], parameter_bytes=result[stage].parameter_bytes + weight.bytes)
            if weight.name in graph.frozen:
                result[stage] = cost
                continue
            result[stage] = evolve(
                cost,
                gradient_bytes=cost.gradient_bytes + weight.bytes,
                largest_gradient_bytes=max(cost.largest_gradient_bytes, weight.bytes),
                optimizer_bytes=cost.optimizer_bytes + round(share * weight.bytes),
            )
    return tuple(result)


def replica_share(graph: OpGraph) -> float:
    """Bytes of optimizer state per byte of gradients in the graph."""
    gradients = sum(node.gradient_bytes for node in graph.nodes)
    return sum(node.optimizer_bytes for node in graph.nodes) / gradients if gradients else 0.0


def _parameters(graph: OpGraph, names: Sequence[str]) -> tuple[str, ...]:
    nodes = (graph.nodes[graph.index[name]] for name in names)
    return tuple(dict.fromkeys(parameter for node in nodes for parameter in node.parameters))


def _tied(
    graph: OpGraph, parameters: Sequence[tuple[str, ...]], sizes: Mapping[str, int] | None
) -> tuple[TiedWeight, ...]:
    readers: dict[str, list[int]] = {}
    for stage, names in enumerate(parameters):
        for name in names:
            readers.setdefault(name, []).append(stage)
    return tuple(
        TiedWeight(name, tuple(stages), parameter_bytes(graph, name, sizes))
        for name, stages in readers.items()
        if len(stages) > 1
    )


def parameter_bytes(graph: OpGraph, parameter: str, sizes: Mapping[str, int] | None) -> int:
    """Bytes of a parameter that several operators read.

    Raises:
        RequestError: it is not in ``sizes``, and no operator reads only this parameter.
    """
    if sizes is not None and parameter in sizes:
        return sizes[parameter]
    alone = [node.parameter_bytes for node in graph.nodes if node.parameters == (parameter,)]
    if not alone:
        raise RequestError(
            f"the size of parameter '{parameter}', which several stages read, is not known: give it in parameter_sizes"
        )
    return max(alone)


def even_plan(graph: OpGraph, schedule: Schedule, parameter_sizes: Mapping[str, int]) -> Plan:
    """A plan whose stages have equal numbers of operators, up to rounding, in the graph's order.

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
