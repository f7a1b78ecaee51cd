"""The planner's entries: from a graph to a plan, or from its parts to the next part."""

from collections.abc import Mapping, Sequence

from attrs import evolve

from ..cluster import Cluster
from ..costs import StageCosts, stage_edges
from ..errors import InfeasibleError, RequestError
from ..graph import OpGraph
from ..partition import (
    Held,
    PartitionProblem,
    RangeTables,
    device_limits,
    in_flight_1f1b,
    partition,
    refuse_above,
    round_robin,
    stages_of,
)
from ..plan import Plan, Prediction
from ..schedules.early import early_gradients
from ..schedules.problem import ScheduleFamily, ScheduleProblem
from .assemble import assemble
from .infeasible import NothingFits
from .options import MAX_CHUNKS, options, schedule_problem
from .score import Candidate, Judge, Oracle, Progress
from .search import Search

BUDGET = 2000
"""Evaluations of a search unless told."""
EARLY = 4
"""Most evaluations for gradients sent early, once all else is chosen."""
SPARED = 10
"""A search spends at least this many times as many on all else."""


def plan(
    graph: OpGraph,
    cluster: Cluster,
    microbatches: int,
    *,
    families: Sequence[ScheduleFamily],
    oracle: Oracle,
    memory_limit: float | None = None,
    budget: int = BUDGET,
    min_chunks: int = 1,
    max_chunks: int = MAX_CHUNKS,
    progress: Progress | None = None,
    parameter_sizes: Mapping[str, int] | None = None,
) -> Plan:
    """Choose cuts, schedule and its parameters together: the fastest found that every device has the memory for.

    Deterministic: the same arguments give the same plan.

    Args:
        graph: operators with their times and sizes for one microbatch.
        cluster: the devices; all of them are used.
        microbatches: in one step.
        families: the schedules to choose among.
        oracle: scores a plan.
        memory_limit: bytes a device may hold, where less than its memory.
        budget: most evaluations.
        min_chunks, max_chunks: fewest and most stages a device.
        progress: told after each evaluation.
        parameter_sizes: bytes of each parameter (see :func:`assemble`).

    Returns:
        The plan with its prediction, which counts the evaluations made.

    Raises:
        RequestError: fewer operators than stages, no microbatches, or no family is made for this problem.
        InfeasibleError: nothing found fits in memory; the message names the device that binds.
    """
    _check(graph, cluster, microbatches, budget=budget, chunks=min_chunks)
    limits = device_limits(cluster, memory_limit)
    judge = Judge(oracle, cluster, limits, budget, progress)
    devices = len(cluster.devices)
    choices = [
        option
        for chunks in range(min_chunks, min(max_chunks, len(graph.nodes) // devices) + 1)
        for option in options(families, ScheduleProblem(devices, microbatches, chunks))
    ]
    counts = _early_counts(microbatches) if budget >= SPARED * EARLY else ()
    judge.reserved = len(counts)
    Search(graph, cluster, microbatches, judge, parameter_sizes).run(choices)
    judge.reserved = 0
    _send_early(judge, counts)
    return _predicted(judge.best, judge)


def partition_stages(
    graph: OpGraph,
    cluster: Cluster,
    microbatches: int,
    *,
    chunks: int = 1,
    memory_limit: float | None = None,
    slack: float = 0.0,
    device_s_per_byte: float = 0.0,
) -> tuple[tuple[str, ...], ...]:
    """Cut a graph of measured operators into ``chunks`` stages for each device, placed round robin.

    Memory is counted as 1F1B holds it; with several chunks, which every schedule holds in its own way, each device is
    counted to hold ``min(devices, microbatches)`` of each of its stages.

    Args:
        graph, cluster, microbatches, memory_limit: as in :func:`plan`.
        chunks: stages a device.
        slack, device_s_per_byte: see :class:`PartitionProblem`.

    Returns:
        Names of the operators of each stage.

    Raises:
        RequestError: more stages than operators.
        InfeasibleError: no cuts keep every device within its limit.
    """
    _check(graph, cluster, microbatches, chunks=chunks)
    devices = len(cluster.devices)
    flight = in_flight_1f1b(devices, microbatches)
    if chunks > 1:
        flight = (float(min(devices, microbatches)),) * (devices * chunks)
    problem = PartitionProblem(
        RangeTables(graph),
        cluster,
        round_robin(devices, chunks),
        flight,
        device_limits(cluster, memory_limit),
        slack,
        device_s_per_byte,
    )
    return stages_of(graph, partition(problem))


def choose_schedule(
    graph: OpGraph,
    stages: Sequence[Sequence[str]],
    costs: Sequence[StageCosts],
    cluster: Cluster,
    microbatches: int,
    *,
    families: Sequence[ScheduleFamily],
    oracle: Oracle,
    memory_limit: float | None = None,
    budget: int = BUDGET,
    progress: Progress | None = None,
    parameter_sizes: Mapping[str, int] | None = None,
) -> Plan:
    """Choose the schedule and its parameters for stages that are cut and measured already.

    Args:
        graph: what the stages cut.
        stages: names of the operators of each stage, as many as devices or a multiple.
        costs: measured, one for each stage.
        cluster, microbatches, families, oracle, memory_limit, budget, progress, parameter_sizes: as in :func:`plan`.

    Returns:
        The plan with its prediction from ``costs``.

    Raises:
        RequestError: the number of stages is no multiple of the devices, or no family is made for this problem.
        InfeasibleError: no schedule keeps every device within its limit.
    """
    _check(graph, cluster, microbatches, budget=budget)
    devices = len(cluster.devices)
    if len(stages) % devices or not stages or len(costs) != len(stages):
        raise RequestError(
            f"{len(stages)} stages with {len(costs)} costs for {devices} devices: give as many stages as devices, or a "
            "multiple, and costs for each"
        )
    limits = device_limits(cluster, memory_limit)
    judge = Judge(oracle, cluster, limits, budget, progress)
    edges = stage_edges(graph, stages)
    bare = ScheduleProblem(devices, microbatches, len(stages) // devices, tuple(costs))
    for option in options(families, bare)[:budget]:
        placement = option.placement(devices)
        problem = schedule_problem(cluster, microbatches, placement=placement, costs=costs, edges=edges, limits=limits)
        schedule = option.build(problem)
        if schedule is not None:
            draft = assemble(graph, stages, schedule, parameter_sizes=parameter_sizes, edges=edges)
            judge.score(draft, tuple(costs))
    _send_early(judge, _early_counts(microbatches))
    return _predicted(judge.best, judge)


def _early_counts(microbatches: int) -> tuple[int, ...]:
    """Numbers of backwards to try in halves: 1, 2, 4 and so on, and all."""
    return (*(1 << n for n in range(EARLY - 1) if 1 << n < microbatches), microbatches)


def _send_early(judge: Judge, counts: Sequence[int]) -> None:
    """Try the best plan with its last backwards in halves, where they are whole; the judge keeps what is better."""
    best = judge.best
    if best is None:
        return
    for count in counts[: judge.left]:
        orders = early_gradients(best.plan.device_actions, best.plan.placement, count)
        if orders == best.plan.device_actions:
            return
        name = f"{best.plan.schedule}+early({count})"
        judge.score(evolve(best.plan, schedule=name, device_actions=orders), best.costs)


def _check(graph: OpGraph, cluster: Cluster, microbatches: int, *, budget: int = 1, chunks: int = 1) -> None:
    wanted = ((microbatches, "microbatches: a step"), (budget, "evaluations: a search"), (chunks, "chunks: a device"))
    for count, what in wanted:
        if count < 1:
            raise RequestError(f"{count} {what} needs at least 1")
    devices = len(cluster.devices)
    if devices * chunks > len(graph.nodes):
        each = "" if chunks == 1 else f" with {chunks} stages each"
        raise RequestError(
            f"{devices} devices{each} for {len(graph.nodes)} operators: a stage needs at least one operator; "
            f"use at most {len(graph.nodes) // chunks} devices"
        )


def _predicted(best: Candidate | None, judge: Judge) -> Plan:
    """The best plan with its prediction, or the reason why nothing fits."""
    if best is None:
        raise RequestError(
            f"none of the schedules is made for {len(judge.cluster.devices)} devices and these microbatches: "
            "give other families or another number of microbatches"
        )
    score = best.score
    plan = evolve(
        best.plan,
        prediction=Prediction(
            costs=best.costs,
            cluster=judge.cluster,
            step_s=score.step_s,
            peak_memory_bytes=score.peak_memory_bytes,
            peak_saved_bytes=score.peak_saved_bytes,
            bubble_ratio=score.bubble_ratio,
            evaluations=judge.evaluations,
        ),
    )
    if best.rank[0] > 0:
        try:
            refuse_above(judge.cluster, judge.limits, _held(best))
        except InfeasibleError as error:
            raise NothingFits(str(error), plan, judge.limits) from None
    return plan


def _held(candidate: Candidate) -> tuple[Held, ...]:
    result = []
    for device, (peak, saved) in enumerate(
        zip(candidate.score.peak_memory_bytes, candidate.score.peak_saved_bytes, strict=True)
    ):
        state = sum(candidate.costs[stage.index].state_bytes for stage in candidate.plan.stages_on(device))
        held = f"by {candidate.plan.schedule}, {candidate.plan.microbatches} microbatches"
        result.append(Held(state, saved, max(peak - state - saved, 0.0), held))
    return tuple(result)
