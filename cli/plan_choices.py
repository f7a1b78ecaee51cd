"""What the options of ``panpipe plan`` leave to the search: mesh, size of microbatches, recomputation."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..core.cluster.catalog.find import CPU
from ..core.cluster.cluster import Cluster
from ..core.cluster.mesh import parse_mesh
from ..core.errors import RequestError
from ..core.plan.derive import Recompute
from ..core.plan.plan import Plan
from ..core.search import Oracle, longest_path
from ..core.trace.throughput import Work
from .costs import PlanningCosts

if TYPE_CHECKING:
    from ..core.search.problem.workload import Workload

SIZES = (1, 2, 4, 8)
"""Samples of a microbatch that are tried where nobody says how many microbatches there are."""


def counted_workload(costs: PlanningCosts, cluster: Cluster, microbatches: int) -> "Workload":
    """So many microbatches, each with these costs, over all replicas."""
    from ..core.search.problem.workload import Workload, kinds_of

    kinds = kinds_of(tuple(costs.by_type), cluster)
    return Workload(lambda _: costs.graphs, microbatches, (1,), kinds, costs.parameter_sizes)


def sized_workload(costs_of: Callable[[int], PlanningCosts], cluster: Cluster, batch: int) -> "Workload":
    """A batch of samples, cut into microbatches of a size to be chosen; ``costs_of`` tells their costs by number."""
    from ..core.search.problem.workload import Workload, kinds_of

    sizes = tuple(size for size in SIZES if batch % size == 0 and size <= batch)
    known = {size: costs_of(batch // size) for size in sizes}
    first = known[sizes[0]]
    kinds = kinds_of(tuple(first.by_type), cluster)
    return Workload(lambda size: known[size].graphs, batch, sizes, kinds, first.parameter_sizes)


def wanted_meshes(mesh: str | None, cluster: Cluster, *, free: bool) -> Sequence[tuple[int, int]]:
    """Pipeline and data dimensions to choose among.

    Args:
        mesh: ``auto``, or such as ``pp=8`` or ``pp=8,dp=4``; None is auto where ``free``, else one pipeline. Which of
            the two runs across nodes is for the search, which tries both.
        cluster: all of its devices are used.
        free: whether a plan may have replicas unless told.

    Raises:
        RequestError: it is written otherwise, or does not use every device.
    """
    from ..core.search.problem.workload import meshes

    count = len(cluster.devices)
    if mesh == "auto" or (mesh is None and free):
        return meshes(count)
    if mesh is None:
        return [(count, 1)]
    found = parse_mesh(mesh).over(count, "devices in the cluster")
    return [(found.pipeline, found.data)]


def wanted_recompute(recompute: str | None, *, free: bool) -> Recompute | None:
    """``none``, ``all``, or None for what the search chooses.

    Raises:
        RequestError: it is none of these.
    """
    if recompute not in (None, "none", "all", "auto"):
        raise RequestError(f"--recompute is '{recompute}': give none, all or auto")
    if recompute == "auto" or (recompute is None and free):
        return None
    return recompute or "none"


def replicas_allowed(graph_given: bool, cluster: str) -> bool:
    """Whether a plan may have replicas and recompute unless told: not where a file or this host is planned for."""
    return not graph_given and CPU.fullmatch(cluster) is None


def of_one_replica(costs: PlanningCosts, plan: Plan) -> tuple[Work, Sequence[float] | None]:
    """What one replica works on, of what a step does, and the peak FLOP/s of its devices where they are known."""
    work, data, peaks = costs.work, plan.mesh.data, costs.peak_flops_per_s
    flops = None if work.flops is None else work.flops / data
    samples, tokens = (None if total is None else total // data for total in (work.samples, work.tokens))
    devices = plan.mesh.cluster_devices[: plan.devices]
    return Work(samples, tokens, flops), None if peaks is None else [peaks[device] for device in devices]


def oracle_of(graph_given: bool) -> Oracle:
    """The last word on plans: for a file a longest path, as the file's contract has it; else the simulator."""
    if graph_given:
        return longest_path
    from ..simulators.oracle import simulated

    return simulated
