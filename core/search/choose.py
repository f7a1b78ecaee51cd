"""The planner's entries: from a graph to plans, or from stages to a schedule."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from ..cluster.cluster import Cluster
from ..costs.costs import StageCosts, stage_edges
from ..costs.graph import OpGraph
from ..costs.message_times import FREE, MessageLine
from ..costs.partition import device_limits
from ..errors import RequestError
from ..plan.derive import Recompute
from ..plan.plan import Plan
from ..schedules.problem import ScheduleFamily
from .confirm import SearchResult, confirmed
from .problem.arrange import Replicas
from .problem.freedom import Freedom
from .problem.meter import Meter, Progress
from .problem.options import MAX_CHUNKS
from .problem.oracle import longest_path
from .problem.score import Oracle
from .problem.setting import FixedStages, Setting, one_setting
from .problem.workload import Workload, counted, settings_of

EFFORT = 400_000_000
"""Compute actions that a search evaluates by default: some seconds on one core, and as many again for its starts."""
FIRST = 0.75
"""Share of it for a search whose plans an oracle scores that counts more: further searches may follow."""
LEAST, MOST = 20_000, 400_000
"""Evaluations that this comes to, at least and at most."""


def search_plans(
    work: Workload,
    cluster: Cluster,
    *,
    families: Sequence[ScheduleFamily],
    oracle: Oracle = longest_path,
    meshes: Sequence[tuple[int, int]] | None = None,
    anneal: bool = True,
    recompute: Recompute | None = "none",
    memory_limit: float | None = None,
    budget: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    min_chunks: int = 1,
    max_chunks: int = MAX_CHUNKS,
    progress: Progress | None = None,
    replicas: Replicas | None = None,
    until_fit: bool = False,
    message: MessageLine = FREE,
    alternatives: bool = True,
) -> SearchResult:
    """Choose mesh, microbatches, devices' places, cuts, schedule, recomputation and orders together: the fastest step
    found that memory allows.

    Deterministic for a seed and a budget: the same arguments give the same plans, unless ``seconds`` cuts the search.

    Args:
        work: what a step works on, at which costs.
        cluster: the devices; all of them are used.
        families: the schedules to choose among.
        oracle: the last word on the best plans. The search itself counts a transfer as a pure delay.
        meshes: pipeline and data dimensions to choose among; by default one pipeline over all devices.
        anneal: whether a device's order may depart from the family's (the schedule ``auto``).
        recompute: ``"none"``, ``"all"`` or the stages that do; None chooses, where memory is short.
        memory_limit: bytes a device may hold, where less than its memory.
        budget: evaluations; by default what about ten seconds on one core are enough for.
        seconds: a cap on the time; the best so far counts then.
        seed: of all random numbers.
        min_chunks, max_chunks: fewest and most stages a device.
        progress: told now and then.
        replicas: per replica the cluster's device at each position, where that is decided; of a workload of one kind of
            device and one size of microbatches.
        until_fit: end with the first plans that fit: a small part of the whole search, which finds one where this does.
        message: what a message costs its ends beside its way.
        alternatives: whether the result holds slower plans that need less memory, too.

    Raises:
        RequestError: fewer operators than stages, no microbatches, or no family is made for this problem.
        NothingFits: nothing found fits in memory; the message names the device that binds.
    """
    limits = device_limits(cluster, memory_limit)
    wanted = [(len(cluster.devices), 1)] if meshes is None else list(meshes)
    _check(work.batch, budget, min_chunks)
    if replicas is None:
        settings = settings_of(work, cluster, limits, wanted, min_chunks)
    else:
        (size,) = work.sizes
        microbatches = work.batch // (len(replicas) * size)
        sizes = work.parameter_sizes
        settings = [one_setting(work.costs(size)[0], cluster, microbatches, limits, sizes, replicas)]
    settings = [evolve(setting, message=message) for setting in settings]
    freedom = Freedom(tuple(families), anneal, (min_chunks, max_chunks), recompute)
    meter = _meter(settings, budget, seconds, progress, until_fit, 1.0 if oracle is longest_path else FIRST)
    return confirmed(settings, freedom, meter, oracle, seed, alternatives)


def plan(
    graph: OpGraph, cluster: Cluster, microbatches: int, *, parameter_sizes: Mapping[str, int] | None = None,
    replicas: Replicas | None = None, **choices: Any,
) -> Plan:  # fmt: skip
    """The best plan for so many microbatches of a replica, each with the costs of ``graph``; by default there is one
    pipeline over all devices.

    Further arguments and errors as in :func:`search_plans`.
    """
    count = 1 if replicas is None else len(replicas)
    work = counted(graph, cluster, microbatches * count, parameter_sizes)
    return search_plans(work, cluster, replicas=replicas, alternatives=False, **choices).best


def choose_schedules(
    graph: OpGraph,
    stages: Sequence[Sequence[str]],
    costs: Sequence[StageCosts],
    cluster: Cluster,
    microbatches: int,
    *,
    families: Sequence[ScheduleFamily],
    oracle: Oracle,
    anneal: bool = True,
    recompute: Recompute | None = "none",
    memory_limit: float | None = None,
    budget: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    parameter_sizes: Mapping[str, int] | None = None,
    replicas: Replicas | None = None,
    message: MessageLine = FREE,
    alternatives: bool = True,
) -> SearchResult:
    """Choose the schedule and its parameters for stages that are cut and measured already.

    Args:
        graph: what the stages cut.
        stages: names of the operators of each stage, as many as devices or a multiple.
        costs: measured, one for each stage; of its programs alone.
        cluster, microbatches, families, oracle, anneal, recompute, memory_limit, budget, seconds, seed, progress: as
            in :func:`search_plans`.
        parameter_sizes: bytes of each parameter (see :func:`assemble`).
        replicas: per replica the cluster's device at each position; by default one pipeline over all devices.
        message: what a message costs its ends beside its way.
        alternatives: whether plans that hold less memory are wanted, too.

    Returns:
        Plans with predictions from ``costs``: the fastest, then those that hold less than every faster one.

    Raises:
        RequestError: the number of stages is no multiple of the devices, or no family is made for this problem.
        InfeasibleError: no schedule keeps every device within its limit.
    """
    _check(microbatches, budget)
    devices = len(cluster.devices if replicas is None else replicas[0])
    if len(stages) % devices or not stages or len(costs) != len(stages):
        raise RequestError(
            f"{len(stages)} stages with {len(costs)} costs for {devices} devices: give as many stages as devices, or a "
            "multiple, and costs for each"
        )
    limits = device_limits(cluster, memory_limit)
    fixed = FixedStages(tuple(map(tuple, stages)), tuple(costs), stage_edges(graph, stages))
    setting = evolve(one_setting(graph, cluster, microbatches, limits, parameter_sizes, replicas, message), fixed=fixed)
    chunks = len(stages) // devices
    freedom = Freedom(tuple(families), anneal, (chunks, chunks), recompute)
    meter = _meter([setting], budget, seconds, progress)
    return confirmed([setting], freedom, meter, oracle, seed, alternatives=alternatives)


def choose_schedule(*given: Any, **choices: Any) -> Plan:
    """The fastest plan of :func:`choose_schedules`, with its arguments and errors."""
    return choose_schedules(*given, alternatives=False, **choices).best


def _meter(
    settings: Sequence[Setting], budget: int | None, seconds: float | None, progress: Progress | None,
    until_fit: bool = False, share: float = 1.0,
) -> Meter:  # fmt: skip
    """A meter; by default for as many evaluations of the largest setting as a share of ``EFFORT`` pays for."""
    if budget is None:
        actions = max(6 * setting.devices * setting.microbatches for setting in settings)
        budget = min(max(int(share * EFFORT) // actions, LEAST), MOST)
    return Meter(budget, seconds, progress, until_fit=until_fit)


def _check(microbatches: int, budget: int | None, chunks: int = 1) -> None:
    wanted = (
        (microbatches, "microbatches: a step"), (1 if budget is None else budget, "evaluations: a search"),
        (chunks, "chunks: a device"),
    )  # fmt: skip
    for count, what in wanted:
        if count < 1:
            raise RequestError(f"{count} {what} needs at least 1")
