"""The request of ``panpipe plan``, the same request with a change, and the budget of its searches."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, frozen

from ...core.cluster.cluster import Cluster
from ...core.cluster.tensor_groups import GroupedCluster, consecutive_groups
from ...core.costs.partition import device_limits
from ...core.errors import InfeasibleError, RequestError
from ...core.plan.plan import Plan
from ...core.policies.sharding import AUTO, LEVELS, NONE, level_and_sharers
from ...core.schedules.registry import families
from ...core.search.search_options import SearchOptions
from ...core.search.suggestions.changes import InfeasibleRequest, Relaxation
from ...core.search.suggestions.relaxations import with_more_devices, with_more_memory, with_smaller_microbatches
from ...core.validation.interval import with_step_error
from ..output import note
from .choices import wanted_meshes
from .costs import PlanningCosts

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


RESERVED = 0.06
"""Share of a given budget for searches with fewer devices, where they follow."""


@define
class Allowance:
    """What the searches of an answer may still take.

    Args:
        evaluations: of all of them; None if each has its own default.
        seconds: for all of them; None for no limit. Only the time within :meth:`timed` counts.
        clock: seconds from any start.
    """

    evaluations: int | None
    seconds: float | None
    clock: Callable[[], float] = time.monotonic

    def share(self, searches: int, *, reserve: bool = False) -> int | None:
        """Evaluations of the next search, at least one.

        Args:
            searches: how many are left, including the next one.
            reserve: whether searches with fewer devices follow them.
        """
        if self.evaluations is None:
            return None
        return max(int(self.evaluations * (1 - RESERVED if reserve else 1)) // searches, 1)

    def spend(self, evaluations: int) -> None:
        """Count evaluations."""
        if self.evaluations is not None:
            self.evaluations -= evaluations

    @property
    def exhausted(self) -> bool:
        """Whether no evaluations or no time are left."""
        return (self.evaluations is not None and self.evaluations < 1) or (
            self.seconds is not None and self.seconds <= 0
        )

    @contextmanager
    def timed(self, searches: int = 1) -> Iterator[float | None]:
        """Run one search, of the ``searches`` that are left; yields its limit in seconds, or None."""
        start = self.clock()
        try:
            yield None if self.seconds is None else self.seconds / searches
        finally:
            if self.seconds is not None:
                self.seconds -= self.clock() - start


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
        from ...core.search.compiling import compile_ahead

        compile_ahead(note)  # does nothing if it is compiled
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

    def prepare(self) -> None:
        """Compute the costs and compile the search; neither counts towards the time limit of the search."""
        from ...core.search.compiling import compile_ahead

        compile_ahead(note)
        _ = self.costs

    def alone(self, devices: int, allowance: Allowance) -> Plan:
        """The best plan that uses only the first ``devices`` devices.

        Raises:
            RequestError: no evaluations or no time are left.
        """
        if allowance.exhausted:
            raise RequestError("no evaluations or no time are left: give a larger --budget or --seconds")
        few = min(allowance.share(devices.bit_length()) or FEW, FEW)
        with allowance.timed() as limit_s:
            one = self.search(meshes=[(devices, 1)], budget=few, seconds=limit_s, alternatives=False, shard=NONE)
        allowance.spend(one.evaluations)
        return one.best

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
