"""Put a plan together from stages and a schedule."""

from collections.abc import Mapping, Sequence

from ..costs import StageEdge, stage_edges
from ..errors import RequestError
from ..graph import OpGraph
from ..plan import Mesh, Plan, Stage, TiedWeight
from ..schedules.problem import Schedule


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
        graph: what is trained.
        stages: names of the operators of each stage.
        schedule: placement and compute order.
        parameter_sizes: bytes of each parameter; needed for those that several stages read. Where it is None, the
            size is taken from an operator that reads that parameter alone.
        edges: where they are known already; else they follow from the graph.

    Raises:
        RequestError: the schedule is for another number of stages, a node is in no stage or in two, or the size of a
            tied weight is not known.
    """
    if len(stages) != len(schedule.placement):
        raise RequestError(
            f"schedule {schedule.name} places {len(schedule.placement)} stages and the partition has {len(stages)}: "
            "build it for as many"
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
        TiedWeight(name, tuple(stages), _size(graph, name, sizes))
        for name, stages in readers.items()
        if len(stages) > 1
    )


def _size(graph: OpGraph, parameter: str, sizes: Mapping[str, int] | None) -> int:
    if sizes is not None and parameter in sizes:
        return sizes[parameter]
    alone = [node.parameter_bytes for node in graph.nodes if node.parameters == (parameter,)]
    if not alone:
        raise RequestError(
            f"the size of parameter '{parameter}', which several stages read, is not known: give it in parameter_sizes"
        )
    return max(alone)
