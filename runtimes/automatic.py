"""Planning on the machine at hand: measure operators, cut, measure the stages that result, choose the schedule.

1. Every device times every operator, all at once; the mean counts.
2. For each number of stages a device, cuts are searched on these times.
3. Every device compiles and times its stages of each cut: their own programs, not sums of operators.
4. A schedule is chosen for each on the times of 3. They also correct the times of 1, and where another cut follows from
   that, it goes through 3 and 4 too. The fastest prediction becomes the plan.
"""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve
from torch import Tensor

from ..core.capture.operators import Operators, tensor_bytes
from ..core.cluster import Cluster, fully_connected
from ..core.costs import StageCosts
from ..core.errors import InfeasibleError, RequestError
from ..core.graph import OpGraph
from ..core.plan import Plan
from ..core.planner import Oracle, choose_schedule
from ..core.planner import plan as search_plan
from ..core.schedules.problem import ScheduleFamily
from .compiled import compile_stages
from .microbatches import Microbatch
from .profile import profile_link, profile_operators, profile_stages
from .state import OptimizerFactory
from .team import Team

CORRECTIONS = 2
"""How often cuts are searched again on times corrected by measured stages, for each number of stages a device."""

Report = Callable[[str], None]
CUT_EVALUATIONS = 300
"""Evaluations of the search for cuts, for each number of stages a device."""


def automatic_plan(
    operators: Operators, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], microbatch: Microbatch,
    microbatches: int, team: Team, *, families: Sequence[ScheduleFamily], oracle: Oracle, cut_oracle: Oracle,
    optimizer: OptimizerFactory | None, max_chunks: int = 2, cluster: Cluster | None = None,
    report: Report | None = None,
) -> Plan:  # fmt: skip
    """Measure, search and choose.

    Args:
        operators: the captured step.
        parameters, buffers: the model's, by qualified name; read, never changed.
        microbatch: a real one.
        microbatches: how many a step has.
        team: the devices.
        families: the schedules to choose among.
        oracle: scores a plan whose stages are measured.
        cut_oracle: scores a plan while cuts are searched; a quick one.
        optimizer: makes each stage's optimizer.
        max_chunks: most stages a device.
        cluster: the machine; measured if None.
        report: told what is going on.

    Returns:
        The plan, the same on every rank, with its prediction.

    Raises:
        RequestError: the model has fewer operators than there are devices.
        InfeasibleError: nothing fits in memory.
    """
    tell = report or (lambda _: None)
    if team.size > len(operators.graph.nodes):
        raise RequestError(
            f"{team.size} stages for {len(operators.graph.nodes)} operators: a stage needs at least one; "
            f"use at most {len(operators.graph.nodes)} devices"
        )
    tell("measuring links")
    cluster = cluster or measured_cluster(team)
    tell("measuring operators")
    graph = measured_graph(operators, parameters, buffers, microbatch, team)
    sizes = {name: tensor_bytes(parameter) for name, parameter in parameters.items()}

    def _plan_for_chunks(chunks: int) -> Plan | None:
        """Cut, measure, choose; then correct the operators' times by the stages' and see whether another cut follows."""
        count, best, corrected, tried = chunks * team.size, None, graph, []
        for _ in range(1 + CORRECTIONS):
            tell(f"cutting into {count} stages")
            stages = team.decide(
                lambda times=corrected: _cuts(times, cluster, microbatches, families, cut_oracle, chunks, sizes)
            )
            if stages is None or stages in tried:
                break
            tried.append(stages)
            tell(f"measuring {count} stages")
            costs = measured_stages(operators, stages, parameters, buffers, microbatch, team, optimizer)
            choice = team.decide(
                lambda stages=stages, costs=costs: _choose(
                    graph, stages, costs, cluster, microbatches, families, oracle, sizes
                )
            )
            if choice is not None and (best is None or _step_s(choice) < _step_s(best)):
                best = choice
            corrected = corrected_graph(corrected, stages, costs)
        return best

    best: Plan | None = None
    failure: InfeasibleError | None = None
    for chunks in range(1, max_chunks + 1):
        if chunks * team.size > len(graph.nodes):
            break
        try:
            found = _plan_for_chunks(chunks)
        except InfeasibleError as error:
            failure = error
            continue
        if found is not None and (best is None or _step_s(found) < _step_s(best)):
            best = found
    if best is None:
        raise failure or RequestError(f"no schedule is made for {team.size} devices and {microbatches} microbatches")
    return evolve(best, model=operators.step.model_name)


def corrected_graph(graph: OpGraph, stages: Sequence[Sequence[str]], costs: Sequence[StageCosts]) -> OpGraph:
    """The graph with every operator's times scaled so that each stage's sum is what its programs took.

    An operator alone is timed with work around it that a program does not have, and without the memory traffic that a
    program does have.
    """
    scale = {}
    for names, cost in zip(stages, costs, strict=True):
        nodes = [graph.nodes[graph.index[name]] for name in names]
        forward = sum(node.forward_s for node in nodes)
        backward = sum(node.backward_input_s + node.backward_weight_s for node in nodes)
        factors = cost.forward_s / (forward or 1.0), cost.full_backward_s / (backward or 1.0)
        scale.update(dict.fromkeys(names, factors))
    return evolve(
        graph,
        nodes=tuple(
            evolve(
                node,
                forward_s=node.forward_s * scale[node.name][0],
                backward_input_s=node.backward_input_s * scale[node.name][1],
                backward_weight_s=node.backward_weight_s * scale[node.name][1],
            )
            for node in graph.nodes
        ),
    )


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def _cuts(
    graph: OpGraph, cluster: Cluster, microbatches: int, families: Sequence[ScheduleFamily], oracle: Oracle,
    chunks: int, sizes: Mapping[str, int],
) -> tuple[tuple[str, ...], ...] | None:  # fmt: skip
    try:
        found = search_plan(
            graph, cluster, microbatches, families=families, oracle=oracle, budget=CUT_EVALUATIONS,
            min_chunks=chunks, max_chunks=chunks, parameter_sizes=sizes,
        )  # fmt: skip
    except RequestError:
        return None
    return tuple(stage.nodes for stage in found.stages)


def _choose(
    graph: OpGraph, stages: Sequence[Sequence[str]], costs: Sequence[StageCosts], cluster: Cluster, microbatches: int,
    families: Sequence[ScheduleFamily], oracle: Oracle, sizes: Mapping[str, int],
) -> Plan | None:  # fmt: skip
    try:
        return choose_schedule(
            graph, stages, costs, cluster, microbatches, families=families, oracle=oracle, parameter_sizes=sizes
        )
    except (InfeasibleError, RequestError):
        return None


def measured_cluster(team: Team) -> Cluster:
    """This machine as a cluster: its devices share its memory, links as fast as ping-pong between neighbours."""
    if team.size == 1:
        return fully_connected(1, _host_memory(), 1e9, 1e-6)
    measured = [pair for pair in team.everywhere(lambda d: profile_link(team.backend(d))) if pair[1] > 0]
    latency = statistics.median(pair[0] for pair in measured)
    rate = statistics.median(pair[1] for pair in measured)
    return team.decide(lambda: fully_connected(team.size, _host_memory() // team.size, rate, latency))


def _host_memory() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def measured_graph(
    operators: Operators, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], microbatch: Microbatch,
    team: Team,
) -> OpGraph:  # fmt: skip
    """The operator graph with times measured on all devices at once; their mean."""
    graphs = team.everywhere(lambda _: profile_operators(operators, parameters, buffers, microbatch.leaves))
    return evolve(graphs[0], nodes=tuple(_mean_node(same) for same in zip(*(g.nodes for g in graphs), strict=True)))


def _mean_node(same: Sequence[Any]) -> Any:
    return evolve(
        same[0],
        **{
            name: statistics.fmean(getattr(node, name) for node in same)
            for name in ("forward_s", "backward_input_s", "backward_weight_s")
        },
    )


def measured_stages(
    operators: Operators, stages: Sequence[Sequence[str]], parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor], microbatch: Microbatch, team: Team, optimizer: OptimizerFactory | None,
) -> tuple[StageCosts, ...]:  # fmt: skip
    """Costs of stages placed round robin, each from its own programs on its own device, all devices busy."""
    mine = [i for i in range(len(stages)) if i % team.size in team.local]
    compiled = compile_stages(operators, stages, mine)  # compilation is not for threads

    def measure(device: int) -> dict[int, StageCosts]:
        own = {i: compiled.programs[i] for i in mine if i % team.size == device}
        return profile_stages(own, compiled.layout, operators, parameters, buffers, microbatch.leaves, optimizer)

    found = {i: costs for part in team.everywhere(measure) for i, costs in part.items()}
    return tuple(found[i] for i in range(len(stages)))
