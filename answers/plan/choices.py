"""The choices that ``panpipe plan`` can leave to the search: mesh, microbatches, recomputation, tensor ranks."""

from collections.abc import Sequence

from attrs import evolve

from ...core.cluster.catalog.find import CPU
from ...core.cluster.cluster import Cluster
from ...core.cluster.mesh import parse_mesh, plain
from ...core.cluster.tensor_groups import GroupedCluster, consecutive_groups
from ...core.errors import RequestError
from ...core.plan.plan import Plan
from ...core.policies.recompute import Recompute
from ...core.schedules.problem import ScheduleFamily
from ...core.search.problem.options import MAX_CHUNKS
from ..bundled_models import is_bundled, shared_sizes
from .options import PlanOptions


def wanted_meshes(mesh: str | None, cluster: Cluster, *, analytic_costs: bool) -> Sequence[tuple[int, int]]:
    """The pairs of pipeline and data dimensions to choose among.

    Args:
        mesh: ``auto``, or for example ``pp=8`` or ``pp=8,dp=4``; None is auto with
            ``analytic_costs``, otherwise one pipeline. The search tries both dimensions across nodes.
        analytic_costs: whether costs are derived from the devices' descriptions; a plan then may have replicas by
            default.

    Raises:
        RequestError: the text has another form, or the mesh does not use every device.
    """
    from ...core.search.problem.workload import meshes

    count = len(cluster.devices)
    if mesh == "auto" or (mesh is None and analytic_costs):
        return meshes(count)
    if mesh is None:
        return [(count, 1)]
    found = parse_mesh(mesh).over(count, "devices in the cluster")
    return [(found.pipeline, found.data)]


def wanted_chunks(chunks: int | None, wanted: Sequence[ScheduleFamily]) -> tuple[int, int] | None:
    """Fewest and most stages of a device; None if the search chooses.

    A schedule of several stages a device, asked for by its name, has several.

    Raises:
        RequestError: none of them has as many.
    """
    if chunks is None:
        several = [family.usual_chunks > 1 for family in wanted]
        return (2, MAX_CHUNKS) if all(several) else None
    if not any(family.chunks is None or chunks in family.chunks for family in wanted):
        known = ", ".join(sorted({str(count) for family in wanted for count in family.chunks or ()}))
        raise RequestError(
            f"--chunks is {chunks}, and {' or '.join(family.name for family in wanted)} has {known} stages a device: "
            "leave it out, or give another --schedule, such as interleaved-1f1b"
        )
    return chunks, chunks


def wanted_recompute(options: PlanOptions, *, analytic_costs: bool) -> Recompute | None:
    """``none``, ``all``, the stages that recompute, or None to let the search choose.

    No stage recomputes with ``attention`` or ``every:N``, whose costs have it in the backward.

    Raises:
        RequestError: it is none of these.
    """
    recompute = options.recompute
    if options.within:
        if not analytic_costs:
            raise RequestError(f"--recompute {recompute} is for a model on a described cluster: give none, all or auto")
        return "none"
    if recompute == "auto" or (recompute is None and analytic_costs):
        return None
    if recompute not in (None, "none", "all"):
        raise RequestError(
            f"--recompute is '{recompute}': give none, all, auto, attention, or every:N with N of at least 1"
        )
    return recompute or "none"


AUTO = "auto"


def wanted_tensor(tp: str | None, machine: Cluster, cluster: str, model: str | None, others: int = 1) -> Sequence[int]:
    """The numbers of tensor ranks to choose among.

    Args:
        cluster: the cluster's name on the command line.
        model: ``module:factory`` or a bundled model's name; None for an operator-graph file.
        others: number of context and expert ranks for each tensor rank.

    Raises:
        RequestError: the option is none of these, the model or the cluster cannot be split, or the number of devices is
            no multiple of the number of ranks.
    """
    if tp is None or tp == "1":
        return [1]
    if tp != AUTO and not (tp.isdecimal() and int(tp) >= 1):
        raise RequestError(f"--tp is '{tp}': give a whole number of at least 1, or auto")
    if model is None:
        raise RequestError(
            "--tp splits a model's layers, and --graph gives operators with their costs alone: leave --tp out"
        )
    if not is_bundled(model) and tp == AUTO:
        raise RequestError(f"--tp auto is for bundled models: give the number of tensor ranks of '{model}'")
    if CPU.fullmatch(cluster):
        raise RequestError(f"--tp plans for described devices, and '{cluster}' is this host: name a cluster")
    if tp != AUTO:
        consecutive_groups(machine, int(tp) * others)
        return [int(tp)]
    sizes = shared_sizes(model).values()
    return [
        count for count in (1, 2, 4, 8, 16)
        if len(machine.devices) % (count * others) == 0 and all(size % count == 0 for size in sizes)
        and _near(machine, count)
    ]  # fmt: skip


def _near(machine: Cluster, count: int) -> bool:
    """Whether all devices are equal, and messages between the first ``count`` as fast as between the first two."""
    first = machine.devices[0]
    if any((other.type, other.memory_bytes) != (first.type, first.memory_bytes) for other in machine.devices):
        return count == 1
    distances = [machine.transfer_s(0, other, 1e6) for other in range(1, count)]
    return all(distance <= distances[0] * 1.01 for distance in distances)


def with_tensor_ranks(plan: Plan, machine: Cluster) -> Plan:
    """A plan for groups of tensor ranks as a plan for their devices; unchanged if the machine has single devices."""
    if not isinstance(machine, GroupedCluster):
        return plan
    groups = [[machine.groups[device] for device in replica] for replica in plan.mesh.replicas]
    devices = tuple(tuple(device for group in replica for device in group) for replica in groups)
    mesh = plain(
        evolve(plan.mesh, devices=devices, tensor=machine.tensor, context=machine.context, experts=machine.experts)
    )
    return evolve(plan, mesh=mesh, prediction=evolve(plan.predicted, cluster=machine.single))
