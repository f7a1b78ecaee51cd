"""The request of ``panpipe plan``, the same request with a change, and the choices that it can leave to the search:
mesh, microbatches, recomputation, tensor ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ...core.cluster.catalog.find import CPU
from ...core.cluster.cluster import Cluster
from ...core.cluster.mesh import parse_mesh, plain
from ...core.cluster.tensor_groups import GroupedCluster, consecutive_groups
from ...core.costs.partition import device_limits
from ...core.errors import InfeasibleError, RequestError
from ...core.plan.plan import Plan
from ...core.policies.recompute import Recompute
from ...core.policies.sharding import AUTO, LEVELS, NONE, level_and_sharers
from ...core.schedules.problem import ScheduleFamily
from ...core.schedules.registry import families
from ...core.search.search_options import MAX_CHUNKS, SearchOptions
from ...core.search.suggestions.changes import (
    InfeasibleRequest,
    Relaxation,
    with_more_devices,
    with_more_memory,
    with_smaller_microbatches,
)
from ...core.validation.interval import with_step_error
from ..bundled_models import is_bundled, shared_sizes
from .costs import PlanningCosts
from .options import PlanOptions

if TYPE_CHECKING:
    from ...core.search.confirm import SearchResult
    from ...core.search.problem.blocks import Blocks
    from ...core.search.problem.workload import Workload

LAYERS_IF_ENOUGH = "layers if enough"
"""Stages end between layers, if the model has a layer for each stage of a pipeline."""
SIZES = (1, 2, 4, 8)
"""Samples of a microbatch to try if ``--microbatches`` is not given."""
FEW = 20_000
"""Most evaluations of a search for fewer devices than the cluster has."""


@frozen
class PlanRequest:
    """The model, the devices, and the choices that are left to the search.

    Args:
        costs_of: number of microbatches of a step → the operators with their costs.
        machine: the cluster to plan for; with tensor ranks its devices are groups (``core/cluster/tensor_groups.py``).
        microbatches: of a step, over all replicas; None if the search chooses their size.
        batch: samples of a step, if the search chooses the size of microbatches.
        mesh: the option of the command line (see ``wanted_meshes``).
        analytic_costs: whether costs are derived from the devices' descriptions, not for a file or this host:
            ``costs_of`` then supports other numbers of microbatches, and a plan may have replicas by default.
        boundaries: where stages may end (see ``Blocks``), or ``LAYERS_IF_ENOUGH``.
        within: what the costs recompute within stages, see ``MemoryPolicy``.
    """

    costs_of: Callable[[int], PlanningCosts]
    machine: Cluster
    microbatches: int | None
    batch: int
    options: SearchOptions
    mesh: str | None
    analytic_costs: bool
    boundaries: str = "operators"
    within: str = ""

    @property
    def costs(self) -> PlanningCosts:
        """Costs of the requested microbatches; if the search chooses their size, of microbatches of one sample."""
        return self.costs_of(self.microbatches or self.batch)

    @property
    def limits(self) -> tuple[float, ...]:
        """Bytes that each device of the cluster may use."""
        return device_limits(self.machine, self.options.memory_limit)

    @property
    def problem(self) -> InfeasibleRequest:
        """The facts that the answer needs if no plan fits."""
        options, grouped = self.options, isinstance(self.machine, GroupedCluster)
        level, _ = level_and_sharers(options.shard, AUTO)
        shard = LEVELS[-1] if level == AUTO else level
        return InfeasibleRequest(
            self.costs.graph,
            self.microbatches,
            self.limits,
            recompute_excluded=options.recompute == "none",
            rows=self.costs.work.samples,
            offload_excluded=options.offload == "none" and not grouped and self.boundaries != "layers",
            replicas=max(data for _, data in self._meshes) if shard != LEVELS[-1] else 1,
            shard=shard,
        )

    @property
    def _meshes(self) -> Sequence[tuple[int, int]]:
        """The pairs of pipeline and data dimensions to choose among."""
        return wanted_meshes(self.mesh, self.machine, analytic_costs=self.analytic_costs)

    def search(self, meshes: Sequence[tuple[int, int]] | None = None, **changes: Any) -> "SearchResult":
        """Search plans."""
        from ...core.search.choose import search_plans  # imported here: compiled code takes a second to load

        options, meshes = self.options, self._meshes if meshes is None else meshes
        stages = min(pipeline for pipeline, _ in meshes) * options.min_chunks
        blocks = self._blocks(stages)
        blocks.refuse_too_few(stages)
        if not self.problem.may_fit(Relaxation()):  # only the plan that comes closest is wanted
            plain = tuple(family for family in options.families if family.name == "1f1b") or options.families
            changes = {**changes, "until_fit": True, "budget": 1, "families": plain, "anneal": False}
        found = search_plans(self._workload(blocks), self.machine, evolve(options, **changes), meshes=meshes)
        return evolve(found, plans=tuple(self._finished(blocks.expanded(plan)) for plan in found.plans))

    def _finished(self, plan: Plan) -> Plan:
        """A plan of operators with its interval, and with what its costs recompute."""
        memory = evolve(plan.memory, within=self.within)
        return with_step_error(evolve(plan, memory=memory), self.costs.step_error)

    def _blocks(self, stages: int) -> "Blocks":
        """The blocks that stages consist of, for at least this many stages."""
        from ...core.search.problem.blocks import Blocks

        graph, sizes, boundaries = self.costs.graph, self.costs.parameter_sizes, self.boundaries
        if boundaries == LAYERS_IF_ENOUGH:
            boundaries = "operators"
            with suppress(RequestError):  # no modules repeat
                layers = Blocks.of(graph, "layers", sizes)
                if len(layers.operators) >= stages:
                    return layers
        return Blocks.of(graph, boundaries, sizes)

    def _workload(self, blocks: "Blocks") -> "Workload":
        """Microbatches of the given number, or of a size that the search chooses, with costs summed over blocks."""
        from ...core.search.problem.workload import Workload, kinds_of

        number, total = self.microbatches, self.microbatches or self.batch
        sizes = (1,) if number is not None else tuple(size for size in SIZES if total % size == 0 and size <= total)
        known = {size: self.costs_of(total // size).joined(blocks) for size in sizes}
        first = known[sizes[0]]
        kinds = kinds_of(tuple(first.by_type), self.machine)
        return Workload(lambda size: known[size].graphs, total, sizes, kinds, first.parameter_sizes)

    def alone(self, devices: int, budget: int | None, seconds: float | None) -> Plan:
        """The best plan that uses only the first ``devices`` devices; at most ``FEW`` are evaluated."""
        few = FEW if budget is None else min(budget, FEW)
        return self.search(meshes=[(devices, 1)], budget=few, seconds=seconds, alternatives=False, shard=NONE).best

    def fitting(self, change: Relaxation) -> Plan | None:
        """A plan that fits the changed request; None if the initial plans of its search do not fit."""
        try:
            return self.relaxed(change).search(until_fit=True, alternatives=False).best
        except (InfeasibleError, RequestError):
            return None

    def relaxed(self, change: Relaxation) -> "PlanRequest":
        """The same request with the given changes."""
        machine, mesh, options, boundaries = self.machine, self.mesh, self.options, self.boundaries
        if change.devices is not None:
            machine = _with_more_devices(machine, change.devices)
            if mesh not in (None, "auto"):
                ((_, data),) = self._meshes
                mesh = f"pp={change.devices // data},dp={data}"
        if options.memory_limit is not None:
            options = evolve(options, memory_limit=options.memory_limit + change.extra_bytes)
        if change.recompute:
            options = evolve(options, recompute=None)
        if change.shard is not None:
            options = evolve(options, shard=change.shard)
        if change.offload:
            more = () if len(options.families) == 1 else tuple(each for each in families().values() if each.offloads)
            options, boundaries = evolve(options, offload="auto", families=(*options.families, *more)), "operators"
        machine = with_more_memory(machine, change.extra_bytes)
        other = evolve(self, machine=machine, mesh=mesh, options=options, boundaries=boundaries)
        if change.parts == 1 or self.microbatches is None:
            return other
        costs_of = self.costs_of if self.analytic_costs else lambda _: _in_parts(self.costs, change.parts)
        return evolve(other, microbatches=self.microbatches * change.parts, costs_of=costs_of)


def _with_more_devices(machine: Cluster, devices: int) -> Cluster:
    if not isinstance(machine, GroupedCluster):
        return with_more_devices(machine, devices)
    single = with_more_devices(machine.single, devices * machine.width)
    return consecutive_groups(single, machine.tensor, machine.context, machine.experts)


def _in_parts(costs: PlanningCosts, parts: int) -> PlanningCosts:
    by_type = {name: with_smaller_microbatches(graph, parts) for name, graph in costs.by_type.items()}
    return evolve(costs, graph=with_smaller_microbatches(costs.graph, parts), by_type=by_type)


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
