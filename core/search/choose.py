"""Entry points of the planner: from a graph to plans, or from stages to a schedule.

A plan without a pipeline has one device for each replica. Where it takes hardly longer than the work alone on all
devices, no pipeline can be much faster, and none is searched: the difference would be less than the error of a
prediction.
"""

from collections.abc import Mapping, Sequence

from attrs import evolve

from ..cluster.cluster import Cluster
from ..costs.costs import StageCosts, stage_edges
from ..costs.graph import OpGraph
from ..costs.partition import device_limits
from ..errors import RequestError
from ..plan.plan import Plan
from ..schedules.problem import resident
from .annealing.search import AGAIN, TURNS, placing_moves
from .confirm import SearchResult, confirmed
from .offloaded import OffloadSearch
from .problem.arrangements import Replicas
from .problem.meter import Meter
from .problem.oracle import longest_path
from .problem.setting import FixedStages, Setting, one_setting
from .problem.workload import Workload, settings_of
from .search_options import SearchOptions, refuse_none
from .sharded import sharded_search
from .suggestions.infeasible import NothingFits

EFFORT = 300_000_000
"""Compute actions that a search evaluates by default: some seconds on one core, and about as long for its starts."""
FIRST, GIVEN = 0.75, 0.9
"""Share of it for the first search if another oracle scores its plans, and of a given budget for the first search:
others may follow, for contention, offload, sharding, or memory that only the oracle counts."""
LEAST, MOST = 20_000, 400_000
"""Bounds of the resulting number of evaluations; ``TURNS`` times as many for tiny graphs without offload."""
ALONE = 4_000
"""Evaluations of a search for replicas of one device each, which have few choices."""
LARGEST = 2
"""Most efforts that ``LEAST`` evaluations may take: with a hundred thousand actions per evaluation they would take
minutes, and large orders gain little from single moves."""
USEFUL, STARTS = 300, 40
"""With fewer than this many evaluations moves gain nothing: only the best starts are evaluated, this many times."""


def search_plans(
    work: Workload,
    cluster: Cluster,
    options: SearchOptions,
    *,
    meshes: Sequence[tuple[int, int]] | None = None,
    replicas: Replicas | None = None,
) -> SearchResult:
    """Choose mesh, microbatches, device order, cuts, schedule, recomputation and compute orders together: the fastest
    step found that fits in memory.

    Deterministic for a seed and a budget: the same arguments give the same plans, unless ``seconds`` ends the search.

    Args:
        work: the batch of a step, and the operators' costs.
        meshes: pipeline and data dimensions to choose among; by default one pipeline over all devices.
        replicas: per replica the cluster's device at each position, if fixed; then there is one size of microbatches.

    Raises:
        RequestError: fewer operators than stages, no microbatches, or no family supports this problem.
        NothingFits: no plan found fits in memory; the message names the device that exceeds its limit most.
    """
    limits = device_limits(cluster, options.memory_limit)
    wanted = [(len(cluster.devices), 1)] if meshes is None else list(meshes)
    refuse_none(work.batch, "microbatches: a step")
    if replicas is None:
        settings = settings_of(work, cluster, limits, wanted, options.min_chunks)
    else:
        (size,) = work.sizes
        microbatches = work.batch // (len(replicas) * size)
        graphs, sizes = work.costs(size), work.parameter_sizes
        settings = [Setting(graphs, cluster, replicas, microbatches, work.kinds, tuple(limits), sizes)]
    settings = [evolve(setting, message=options.message) for setting in settings]
    meter = _meter(options, settings)
    return _unpipelined(settings, meter, options) or _found(settings, meter, options)


def _unpipelined(settings: Sequence[Setting], meter: Meter, options: SearchOptions) -> SearchResult | None:
    """Replicas of one device each, if no pipeline can be much faster."""
    alone = [setting for setting in settings if setting.devices == 1]
    if not alone or options.alternatives or options.until_fit:
        return None
    part = meter.part(ALONE)
    try:
        found = _found(alone, part, without_pipeline(options))
    except NothingFits:
        found = None
    meter.spent += part.spent
    return found if found is not None and nearly_as_fast(found, settings) else None


def plan(
    graphs: OpGraph | Sequence[OpGraph],
    cluster: Cluster,
    microbatches: int,
    options: SearchOptions,
    *,
    parameter_sizes: Mapping[str, int] | None = None,
    replicas: Replicas | None = None,
) -> Plan:
    """The best plan; by default there is one pipeline over all devices.

    Args:
        graphs: the operators with the costs of one microbatch; if devices differ, with those on each device along the
            pipeline, such as for one kind of device and different speeds.
        microbatches: of a replica's step.
        parameter_sizes: bytes of each parameter, if known.

    Further arguments and errors as in :func:`search_plans`.
    """
    costs = (graphs,) if isinstance(graphs, OpGraph) else tuple(graphs)
    places = replicas or (tuple(range(len(cluster.devices))),)
    position = {device: at for one in places for at, device in enumerate(one)}
    kinds = tuple(position.get(d, 0) if len(costs) > 1 else 0 for d in range(len(cluster.devices)))
    work = Workload(lambda _: costs, microbatches * len(places), (1,), kinds, parameter_sizes)
    return search_plans(work, cluster, evolve(options, alternatives=False), replicas=replicas).best


def choose_schedules(
    graph: OpGraph,
    stages: Sequence[Sequence[str]],
    costs: Sequence[StageCosts],
    cluster: Cluster,
    microbatches: int,
    options: SearchOptions,
    *,
    parameter_sizes: Mapping[str, int] | None = None,
    replicas: Replicas | None = None,
) -> SearchResult:
    """Choose the schedule and its parameters for stages that are cut and measured already.

    Args:
        graph: what the stages cut.
        stages: names of the operators of each stage, as many as devices or a multiple.
        costs: measured, one for each stage; of its programs alone.
        microbatches: of a replica's step.
        parameter_sizes: bytes of each parameter (see :func:`assemble`).
        replicas: per replica the cluster's device at each position; by default one pipeline over all devices.

    Returns:
        Plans with predictions from ``costs``: the fastest, then those that hold less than every faster one.

    Raises:
        RequestError: the number of stages is no multiple of the devices, or no family supports this problem.
        InfeasibleError: no schedule keeps every device within its limit.
    """
    refuse_none(microbatches, "microbatches: a step")
    devices = len(cluster.devices if replicas is None else replicas[0])
    if len(stages) % devices or not stages or len(costs) != len(stages):
        raise RequestError(
            f"there are {len(stages)} stages with {len(costs)} costs for {devices} devices: give as many stages as "
            "devices, or a multiple, and costs for each"
        )
    limits = device_limits(cluster, options.memory_limit)
    fixed = FixedStages(tuple(map(tuple, stages)), tuple(costs), stage_edges(graph, stages))
    setting = one_setting(graph, cluster, microbatches, limits, parameter_sizes, replicas, options.message)
    setting = evolve(setting, fixed=fixed)
    options = evolve(options, min_chunks=len(stages) // devices, max_chunks=len(stages) // devices)
    return _found([setting], options.meter(_evaluations([setting], options)), options)


def _found(settings: Sequence[Setting], meter: Meter, options: SearchOptions) -> SearchResult:
    """The search, with sharding and offload if they are asked for."""

    def search(these: Sequence[Setting], counter: Meter) -> SearchResult:
        if options.offloads:
            return OffloadSearch(these, options, counter).result()
        return confirmed(these, evolve(options, families=resident(options.families)), counter)

    return sharded_search(settings, meter, options.shard, options.oracle, search)


def _meter(options: SearchOptions, settings: Sequence[Setting]) -> Meter:
    """The budget of a search."""
    return options.meter(_evaluations(settings, options, 1.0 if options.oracle is longest_path else FIRST), GIVEN)


def _evaluations(settings: Sequence[Setting], options: SearchOptions, share: float = 1.0) -> int:
    """By default: as many evaluations of the largest setting as a share of ``EFFORT`` pays for."""
    actions = max(6 * setting.devices * setting.microbatches for setting in settings)
    wanted = max(int(share * EFFORT) // actions, min(LEAST, LARGEST * EFFORT // actions))
    turns = not options.offloads and placing_moves(settings, options, TURNS * MOST) >= AGAIN
    most = TURNS * MOST if turns else MOST
    return STARTS if wanted < USEFUL else min(wanted, most)


NEAR = 0.03
"""Share of the step by which pipelines may be faster and are still not searched."""
ORDERS = ("gpipe", "1f1b", "interleaved-1f1b")
"""The schedules of one device: each order takes as long, and with several stages reductions begin earlier."""


def without_pipeline(options: SearchOptions) -> SearchOptions:
    """The options of a search for these plans: without orders that make no difference on one device."""
    if len(options.families) == 1:
        return options
    plain = tuple(family for family in options.families if family.name in ORDERS)
    return evolve(options, families=plain or options.families, anneal=not plain)


def nearly_as_fast(found: SearchResult, settings: Sequence[Setting]) -> bool:
    """Whether no plan in any of these settings can be faster than the one found by more than ``NEAR``."""
    return found.best.predicted.step_s <= (1 + NEAR) * min(setting.bound_s for setting in settings)
