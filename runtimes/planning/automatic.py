"""Planning on the machine at hand: measure operators, cut, choose schedules.

1. Every device times the operators, all at once; the shortest time counts. A message takes the devices at its ends as
   long as it is on its way, on CPUs.
2. For each number of stages per device, a regular cut (`suggestions/regular_cuts`) is taken, which is the same in the
   next run, and the cut that a search with these times finds, if it loads the busiest device less.
3. Schedules are chosen for each cut. The memory of a stage is the sum of what its operators save.
4. The first plan's stages are compiled, and its memory is that of their programs. If it does not fit, all cuts are
   compiled, and schedules are chosen again.
5. The first steps of training compare the candidates (`contest`), whose stages are compiled when their turn comes.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from attrs import define, evolve, field

from ...core.capture.export.few_operators import refuse_too_few
from ...core.capture.export.operators import Operators
from ...core.cluster.cluster import Cluster, with_limit
from ...core.costs.costs import StageCosts
from ...core.costs.graph import OpGraph
from ...core.errors import InfeasibleError, PanpipeError, RequestError
from ...core.numba_cache import interpreted
from ...core.offload.request import check_offload_request
from ...core.plan.plan import Plan
from ...core.policies.recompute import recomputed_stages
from ...core.schedules.problem import ScheduleFamily
from ...core.search.choose import choose_schedules
from ...core.search.choose import plan as search_plan
from ...core.search.compiling import compile_ahead, is_search_compiled
from ...core.search.problem.blocks import Blocks, Stages
from ...core.search.problem.oracle import with_costs
from ...core.search.search_options import SearchOptions
from ...core.search.suggestions.preference import ALIKE, candidates, family_of, fewest_actions, preference, sums_of
from ...core.search.suggestions.regular_cuts import busiest_device_s, regular_cut
from ..batch.example import Example
from ..launch.progress import Report, silent
from ..launch.team import Team
from ..profile.measured_cluster import measured_cluster
from ..profile.offload_rates import with_hosts
from ..programs.stage_compiler import ProgramOptions
from ..settings import PlanningOptions
from ..update.optimizers import OptimizerFactory
from .measurements import Measurements

PLAIN = "1f1b"
"""The schedule that is always compared."""
CUT_ACTIONS, ORDER_ACTIONS = 500_000, 300_000
"""Compute actions that one search for cuts, and one for orders, evaluates: about a tenth of a second on one core. The
numbers follow from the problem, so that the same request gives the same plan on a fast and on a slow machine."""
LEAST_EVALUATIONS = 2_000
"""Smallest number of evaluations of a search, for any number of actions."""
RIVALS = 3
"""Largest number of other orders that the winner of the first candidates is compared with."""
SHORT_S = 0.1
"""A step by the measured operators, in seconds, below which the search is not compiled: a thousand such steps would
have to become a third shorter to pay for it. If it is not compiled on this machine, little is searched, in Python."""
TINY_S = 0.01
"""Likewise a step below which a compiled search is not loaded: that takes 2 s of processor time, with numba's import.
If this process has imported numba already, it is loaded."""
SHORT_EVALUATIONS = 32
"""Number of evaluations of such a search."""
LEAST_GAIN = 0.03
"""Share of the busiest device's time that a searched cut must gain over a regular one: the measured times of operators
vary by about as much from one run to the next."""


@define(eq=False)
class Planning:
    """The request of an automatic plan.

    Args:
        example: the captured step, with a real microbatch. The model is read and never changed.
        programs: how stage programs are derived; a pipeline of the same stages need not derive them again.

    Attributes:
        measured: the measured times of the model.
        regular: for each number of stages the cut that depends least on them.
    """

    example: Example
    microbatches: int
    team: Team
    options: PlanningOptions
    optimizer: OptimizerFactory | None = None
    programs: ProgramOptions = field(factory=ProgramOptions)
    report: Report = silent
    measured: Measurements = field(init=False)
    regular: set[Stages] = field(factory=set, init=False)
    _in_python: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.measured = Measurements(self.example, self.team, self.optimizer, self.programs)

    @property
    def operators(self) -> Operators:
        """The captured step."""
        return self.example.operators

    def candidates(self) -> list[Plan]:
        """The plans that the first steps of training compare, the same on every rank; the first one runs first.

        The first one's memory is that of its programs, and the others' the sum over operators (see `fitted`).

        Raises:
            RequestError: the model has fewer operators than there are devices.
            InfeasibleError: no plan fits in memory.
        """
        cluster = self._measured_cluster()
        self.report("measuring operators")
        graph = self.measured.graph()
        self._in_python = self.team.decide(lambda: self._prepare_search(graph))  # one rank compiles for all
        if self.options.offload == "none":  # what may leave a device is known of programs alone
            try:
                first, *others = self._compared(self.plans(graph, cluster))
                self.report(f"deriving {len(first.stages)} stages")
                fitted = self.fitted(first)
            except (InfeasibleError, RequestError):  # other stages may have programs that fit
                fitted = None
            if fitted is not None:
                return [fitted, *others]
        return self._compared(self.plans(graph, cluster, derive=True))

    def _prepare_search(self, graph: OpGraph) -> bool:
        """Compile or load the search; return whether it is left uncompiled, for short steps."""
        work_s = sum(node.forward_s + node.backward_input_s + node.backward_weight_s for node in graph.nodes)
        seconds = work_s * self.microbatches / self.team.size
        if (seconds < TINY_S and "numba" not in sys.modules) or (seconds < SHORT_S and not is_search_compiled()):
            return True
        compile_ahead(self.report)
        return False

    def _searching(self) -> AbstractContextManager[None]:
        """A context for searches."""
        return interpreted() if self._in_python else nullcontext()

    def plans(self, graph: OpGraph, cluster: Cluster, *, derive: bool = False) -> list[Plan]:
        """For each cut the fastest plan, and those that need less memory than every faster one.

        Args:
            derive: whether memory is that of the stages' programs.
        """
        found: list[Plan] = []
        failure: PanpipeError | None = None
        for chunks in range(1, self._max_chunks + 1):
            try:
                found += self._plans_of(chunks, graph, cluster, derive)
            except InfeasibleError as error:
                failure = error
            except RequestError as error:
                failure = failure or error
        if not found:
            raise failure or RequestError(
                f"no schedule supports {self.team.size} devices and {self.microbatches} microbatches: give other "
                "numbers"
            )
        return found

    def fitted(self, plan: Plan) -> Plan | None:
        """The plan with the memory of its stages' programs; None if it does not fit then. All ranks call this together.

        Args:
            plan: with a prediction.
        """
        costs = self.measured.derived_costs(plan.predicted.costs, [s.nodes for s in plan.stages], plan.placement)
        plan = with_costs(plan, costs, self.options.oracle)
        limits = plan.mesh.memory_bytes(plan.predicted.cluster)
        fits = all(peak <= limit for peak, limit in zip(plan.predicted.peak_memory_bytes, limits, strict=True))
        return plan if fits else None

    def _compared(self, plans: Sequence[Plan]) -> list[Plan]:
        """The candidates among some plans, and others with their cuts."""
        order = preference([family.name for family in self.options.families])
        if not self.options.contest:
            return candidates(plans, order, self.regular)[:1]
        leaders = {len(plan.stages): plan for plan in sorted(plans, key=step_s, reverse=True)}.values()
        others = [other for leader in leaders for other in self._placed(leader)]
        return candidates([*plans, *others], order, self.regular, plain=self._plain(plans))

    def _plain(self, plans: Sequence[Plan]) -> list[Plan]:
        """1F1B for the most regular cut with the fewest stages; empty if it is not an option or does not fit."""
        families = [family for family in self.options.families if family.name == PLAIN]
        return self._fastest(
            families, min(plans, key=lambda p: (len(p.stages), _cut(p) not in self.regular, step_s(p)))
        )

    def _placed(self, leader: Plan) -> list[Plan]:
        """For each placement of the same stages a plan: how much messages cost, predictions know least."""
        devices, chunks = self.team.size, len(leader.stages) // self.team.size
        placed: dict[tuple[int, ...], list[Plan]] = {}
        for family in self.options.families if chunks > 1 else ():
            placed.setdefault(family.placement(devices, chunks), []).extend(self._fastest([family], leader))
        return [fewest_actions(plans) for plans in placed.values() if plans]

    def rivals(self, leader: Plan, compared: Sequence[Plan]) -> list[Plan]:
        """The fastest plans of other families with other orders, for the same stages, if about as fast is predicted.

        Which of two schedules is faster if their predictions hardly differ, only steps show. Empty if the stages were
        not measured, such as those of a cached plan. All ranks call this together.

        Args:
            compared: those that it was compared with.
        """
        known = [plan for plan in (leader, *compared) if _cut(plan) == _cut(leader)]
        names, found = {family_of(plan) for plan in known}, list[Plan]()
        families = [family for family in self.options.families if family.name not in names]
        while families and len(found) < RIVALS and _cut(leader) in self.measured.costs:
            fastest = self._fastest(families, leader)
            if not fastest or step_s(fastest[0]) > (1 + ALIKE) * step_s(leader):
                break
            same = sums_of(fastest[0]) == sums_of(leader)
            if same and all(fastest[0].device_actions != each.device_actions for each in (*known, *found)):
                found += fastest
            families = [family for family in families if family.name != family_of(fastest[0])]
        return found

    def _fastest(self, families: Sequence[ScheduleFamily], like: Plan) -> list[Plan]:
        """The fastest plan by some families for the stages of a plan; empty if there is none."""
        stages, cluster = _cut(like), like.predicted.cluster
        budget = SHORT_EVALUATIONS if self._in_python else None
        options = evolve(self.search_options(families, cluster), anneal=False, alternatives=False, budget=budget)
        costs = self.measured.costs[stages]

        def build() -> list[Plan]:
            try:
                plan = self._schedules(self.measured.measured, stages, costs, cluster, options)[0]
            except (InfeasibleError, RequestError):
                return []
            return [evolve(plan, mesh=self.team.mesh)]

        return self.team.decide(build) if families else []

    def _measured_cluster(self) -> Cluster:
        """Refuse what can be refused without measuring, and measure the machine."""
        devices, options = self.team.size, self.options
        refuse_too_few(self.operators, devices, devices)
        self._blocks(self.operators.graph).refuse_too_few(devices)
        if options.memory.recompute is not None:
            recomputed_stages(options.memory.recompute, devices * options.max_chunks)
        check_offload_request(options.offload, devices * options.max_chunks)
        if options.cluster is not None:
            self.team.mesh.check(options.cluster)
        self.report("measuring links")
        cluster = options.cluster or with_limit(measured_cluster(self.team, self.measured.where), options.memory.limit)
        if options.offload != "none" and options.cluster is None:
            self.report("measuring copies to the host")
            cluster = with_hosts(cluster, self.team, self.measured.where, options.memory.tier)
        return cluster

    def _evaluations(self, actions: int) -> int:
        if self._in_python:
            return SHORT_EVALUATIONS
        return max(actions // (6 * self.team.size * self.microbatches), LEAST_EVALUATIONS)

    @property
    def _max_chunks(self) -> int:
        """The largest number of stages per device for which there are enough operators."""
        return min(self.options.max_chunks, len(self._blocks(self.operators.graph).operators) // self.team.size)

    def _blocks(self, graph: OpGraph) -> Blocks:
        """The blocks of operators that stay in one stage."""
        return Blocks.of(graph, self.options.boundaries, self.measured.sizes)

    def _plans_of(self, chunks: int, graph: OpGraph, cluster: Cluster, derive: bool) -> list[Plan]:
        """Plans with this many stages per device. Raises an InfeasibleError if none fits."""
        count = chunks * self.team.size
        done, total = 3 * (chunks - 1), 3 * self._max_chunks
        self.report(f"cutting into {count} stages", done, total)
        found, failure = list[Plan](), None
        regular, searched, gains = self.cuts(graph, chunks, cluster)
        self.regular.add(regular)
        for stages in dict.fromkeys((regular, searched)):
            if found and not gains:
                break
            try:
                if derive:
                    self.report(f"deriving {count} stages", done + 1, total)
                costs = self.measured.costs_of(stages, derive=derive)
                self.report(f"choosing a schedule of {count} stages", done + 2, total)
                found += self._choose(graph, cluster, stages, costs)
            except InfeasibleError as error:
                failure = error
        if failure is not None and not found:
            raise failure
        return found

    def cuts(self, graph: OpGraph, chunks: int, cluster: Cluster) -> tuple[Stages, Stages, bool]:
        """The cuts that are worth comparing, each as the operators of its stages.

        Args:
            graph: with times.
            chunks: number of stages of each device.

        Returns:
            A regular cut; the searched one; and whether that gains more than ``LEAST_GAIN`` on the busiest device.

        Raises:
            RequestError: no schedule exists for this number of stages, or for these options.
        """
        blocks, sizes = self._blocks(graph), self.measured.sizes
        graph = blocks.joined(graph)
        wanted = evolve(
            self.search_options(self.options.families, cluster), oracle=self.options.cut_oracle, min_chunks=chunks,
            max_chunks=chunks, budget=self._evaluations(CUT_ACTIONS), storages={},
        )  # fmt: skip

        def search() -> tuple[Stages, Stages, bool]:
            replicas = self.measured.replicas
            with self._searching():
                found = search_plan(graph, cluster, self.microbatches, wanted, parameter_sizes=sizes, replicas=replicas)
            searched = _cut(found)
            regular = regular_cut(graph, len(searched)) or searched
            before, after = (busiest_device_s(graph, stages, found.placement) for stages in (regular, searched))
            return blocks.expanded_stages(regular), blocks.expanded_stages(searched), before > (1 + LEAST_GAIN) * after

        return self.team.decide(search)

    def _choose(self, graph: OpGraph, cluster: Cluster, stages: Stages, costs: tuple[StageCosts, ...]) -> list[Plan]:
        """Plans of measured stages: the fastest, and those that need less memory than every faster one.

        A published schedule is preferred to an order that was annealed for these times, unless that one is predicted to
        gain more than ``ALIKE``. Empty if no schedule exists for these stages. Raises an InfeasibleError if none fits.
        """
        wanted = self.search_options(self.options.families, cluster)

        def search() -> list[Plan]:
            found: list[Plan] = []
            failure: InfeasibleError | None = None
            for anneal in (False, True) if self.options.anneal and not self._in_python else (False,):
                # Another order gains at most the time in which the busiest device is idle.
                if found and min(plan.predicted.bubble_ratio for plan in found) <= ALIKE:
                    break
                try:
                    options = evolve(wanted, anneal=anneal, budget=self._evaluations(ORDER_ACTIONS))
                    plans = self._schedules(graph, stages, costs, cluster, options)
                except RequestError:
                    continue
                except InfeasibleError as error:
                    failure = error
                    continue
                least = min(map(step_s, found), default=float("inf"))
                found += [plan for plan in plans if not found or step_s(plan) < least / (1 + ALIKE)]
            if failure is not None and not found:
                raise failure
            return [evolve(plan, mesh=self.team.mesh) for plan in found]

        return self.team.decide(search)

    def search_options(self, families: Sequence[ScheduleFamily], cluster: Cluster) -> SearchOptions:
        """Options of a search among these schedules, for a machine."""
        options = self.options
        return SearchOptions(
            families=families,
            oracle=options.oracle,
            anneal=options.anneal,
            recompute=options.memory.recompute,
            message=self.measured.message(cluster),
            offload=options.offload,
            shard=options.shard,
            storages=self.measured.storages,
        )

    def _schedules(
        self, graph: OpGraph, stages: Stages, costs: Sequence[StageCosts], cluster: Cluster, options: SearchOptions
    ) -> Sequence[Plan]:
        """Plans of measured stages, the best one first."""
        sizes, replicas = self.measured.sizes, self.measured.replicas
        with self._searching():
            return choose_schedules(
                graph, stages, costs, cluster, self.microbatches, options, parameter_sizes=sizes, replicas=replicas
            ).plans


def step_s(plan: Plan) -> float:
    """The predicted step time, in seconds."""
    return plan.predicted.step_s


def _cut(plan: Plan) -> Stages:
    return tuple(stage.nodes for stage in plan.stages)
