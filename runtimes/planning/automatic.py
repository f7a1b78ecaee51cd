"""Planning on the machine at hand: measure operators, cut, choose schedules.

1. Every device times the operators, all at once; the shortest time counts. The time that a message takes of the devices
   at its ends is measured while they compute.
2. For each number of stages per device, a regular cut (`suggestions/regular_cuts`) is taken, which is the same in the
   next run, and the cut that a search with these times finds, if it is predicted to be faster.
3. Every device compiles its stages of each cut, whose memory is that of their programs. Schedules are chosen.
4. The first steps of training compare plans that differ in time or memory (`contest`), and correct the times.
"""

from collections.abc import Sequence

from attrs import Factory, evolve, field, frozen

from ...core.capture.export.few_operators import refuse_too_few
from ...core.capture.export.operators import Operators
from ...core.cluster.cluster import Cluster
from ...core.costs.costs import StageCosts
from ...core.costs.graph import OpGraph
from ...core.errors import InfeasibleError, PanpipeError, RequestError
from ...core.offload.request import check_offload_request
from ...core.plan.derive import recomputed_stages
from ...core.plan.plan import Plan
from ...core.schedules.problem import ScheduleFamily
from ...core.search.choose import choose_schedules
from ...core.search.problem.blocks import Blocks, Stages
from ...core.search.search_options import SearchOptions
from ...core.search.suggestions.preference import ALIKE, candidates, preference
from ..batch.example import Example
from ..launch.progress import Report, silent
from ..launch.team import Team
from ..optimizer.optimizers import OptimizerFactory
from ..profile.measured_cluster import measured_cluster
from ..profile.offload_rates import with_hosts
from ..programs.options import ProgramOptions
from .cuts import CutSearch
from .measurements import Measurements
from .options import PlanningOptions

PLAIN = "1f1b"
"""The schedule that is always compared."""
CUT_ACTIONS, ORDER_ACTIONS = 1_000_000, 4_000_000
"""Compute actions that one search for cuts, and one for orders, evaluates: some tenths of a second on one core. The
numbers follow from the problem, so that the same request gives the same plan on a fast and on a slow machine."""
LEAST_EVALUATIONS = 2_000
"""Smallest number of evaluations of a search, for any number of actions."""


@frozen
class Planning:
    """The request of an automatic plan.

    Args:
        example: the captured step, with a real microbatch. The model is read and never changed.
        microbatches: of a step.
        team: the devices.
        options: how the plan is searched.
        optimizer: creates each stage's optimizer.
        programs: how stage programs are derived; a pipeline of the same stages need not derive them again.
        report: called with the progress.

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
    measured: Measurements = field(
        default=Factory(
            lambda planning: Measurements(
                planning.example,
                planning.team,
                planning.optimizer,
                planning.programs,
                planning.report,
            ),
            takes_self=True,
        ),
        init=False,
    )

    regular: set[Stages] = field(factory=set, init=False)

    @property
    def operators(self) -> Operators:
        """The captured step."""
        return self.example.operators

    def plans(self) -> list[Plan]:
        """Measure, search and choose.

        Returns:
            Plans with their predictions, the same on every rank: for each number of stages per device the fastest, and
            those that need less memory than every faster one.

        Raises:
            RequestError: the model has fewer operators than there are devices.
            InfeasibleError: no plan fits in memory.
        """
        devices = self.team.size
        refuse_too_few(self.operators, devices, devices)
        self._blocks.refuse_too_few(devices)
        options = self.options
        if options.recompute is not None:
            recomputed_stages(options.recompute, devices * options.max_chunks)  # refused before anything is measured
        check_offload_request(options.offload, devices * options.max_chunks)
        if options.cluster is not None:
            self.team.mesh.check(options.cluster)
        self.report("measuring links")
        cluster = options.cluster or measured_cluster(self.team, self.measured.where)
        if options.offload != "none" and options.cluster is None:
            self.report("measuring copies to the host")
            cluster = with_hosts(cluster, self.team, self.measured.where, options.tier)
        self.report("measuring operators")
        graph = self.measured.graph()
        found: list[Plan] = []
        failure: PanpipeError | None = None
        for chunks in range(1, self._max_chunks + 1):
            try:
                found += self._plans_of(chunks, graph, cluster)
            except InfeasibleError as error:
                failure = error
            except RequestError as error:
                failure = failure or error
        if not found:
            raise failure or RequestError(
                f"no schedule supports {devices} devices and {self.microbatches} microbatches: give other numbers"
            )
        return found

    def cuts(self, cluster: Cluster) -> CutSearch:
        """The search for cuts on a machine."""
        return CutSearch(self.measured, cluster, self.microbatches, self.options, self._evaluations(CUT_ACTIONS))

    def plain(self, plans: Sequence[Plan]) -> list[Plan]:
        """1F1B for the stages of the fastest plan with the fewest stages; empty if it is not an option or does not fit.

        Args:
            plans: measured plans.
        """
        family = next((family for family in self.options.families if family.name == PLAIN), None)
        fewest = min(plans, key=lambda plan: (len(plan.stages), step_s(plan)))
        prediction = fewest.prediction
        if family is None or prediction is None:
            return []
        stages = tuple(stage.nodes for stage in fewest.stages)
        options = evolve(self._search_options([family]), anneal=False)

        def build() -> list[Plan]:
            try:
                costs = self.measured.stage_costs[stages]
                plan = self._schedules(self.operators.graph, stages, costs, prediction.cluster, options)[0]
            except (InfeasibleError, RequestError):
                return []
            return [evolve(plan, mesh=self.team.mesh)]

        return self.team.decide(build)

    def candidates(self) -> list[Plan]:
        """The plans that the first steps of training compare, the same on every rank; errors as of `plans`."""
        plans = self.plans()
        order = preference([family.name for family in self.options.families])
        return candidates(plans, self.plain(plans), order, self.regular)

    def _evaluations(self, actions: int) -> int:
        return max(actions // (6 * self.team.size * self.microbatches), LEAST_EVALUATIONS)

    @property
    def _max_chunks(self) -> int:
        """The largest number of stages per device for which there are enough operators."""
        return min(self.options.max_chunks, len(self._blocks.operators) // self.team.size)

    @property
    def _blocks(self) -> Blocks:
        return Blocks.of(self.operators.graph, self.options.boundaries, self.measured.sizes)

    def _plans_of(self, chunks: int, graph: OpGraph, cluster: Cluster) -> list[Plan]:
        """Plans with this many stages per device: cut, measure, correct the cut, and choose."""
        count = chunks * self.team.size
        done, total = 3 * (chunks - 1), 3 * self._max_chunks
        cuts = self.cuts(cluster)
        self.report(f"cutting into {count} stages", done, total)
        found: list[Plan] = []
        searched = cuts.search(graph, chunks)
        self.regular.add(searched[0])
        for stages in searched:
            self.report(f"deriving {count} stages", done + 1, total)
            costs = self.measured.costs_of(stages)
            self.report(f"choosing a schedule of {count} stages", done + 2, total)
            found += self._choose(graph, cluster, stages, costs)
        return found

    def _choose(self, graph: OpGraph, cluster: Cluster, stages: Stages, costs: tuple[StageCosts, ...]) -> list[Plan]:
        """Plans of measured stages: the fastest, and those that need less memory than every faster one.

        A published schedule is preferred to an order that was annealed for these times, unless that one is predicted to
        gain more than ``ALIKE``. Empty if no schedule exists for these stages, or none fits.
        """
        wanted = self._search_options(self.options.families)

        def search() -> list[Plan]:
            found: list[Plan] = []
            for anneal in (False, True) if self.options.anneal else (False,):
                if found and min(_bubble(plan) for plan in found) <= ALIKE:
                    break
                try:
                    options = evolve(wanted, anneal=anneal, budget=self._evaluations(ORDER_ACTIONS))
                    plans = self._schedules(graph, stages, costs, cluster, options)
                except (InfeasibleError, RequestError):
                    continue
                least = min(map(step_s, found), default=float("inf"))
                found += [plan for plan in plans if not found or step_s(plan) < least / (1 + ALIKE)]
            return [evolve(plan, mesh=self.team.mesh) for plan in found]

        return self.team.decide(search)

    def _search_options(self, families: Sequence[ScheduleFamily]) -> SearchOptions:
        """Options of a search among these schedules. All ranks call it together: it may measure messages."""
        options = self.options
        return SearchOptions(
            families=families,
            oracle=options.oracle,
            anneal=options.anneal,
            recompute=options.recompute,
            message=self.measured.message,
            offload=options.offload,
            shard=options.shard,
            storages=self.measured.storages,
        )

    def _schedules(
        self, graph: OpGraph, stages: Stages, costs: Sequence[StageCosts], cluster: Cluster, options: SearchOptions
    ) -> Sequence[Plan]:
        """Plans of measured stages, the best one first."""
        sizes, replicas = self.measured.sizes, self.measured.replicas
        return choose_schedules(
            graph, stages, costs, cluster, self.microbatches, options, parameter_sizes=sizes, replicas=replicas
        ).plans


def step_s(plan: Plan) -> float:
    """The predicted step time, in seconds."""
    assert plan.prediction is not None
    return plan.prediction.step_s


def _bubble(plan: Plan) -> float:
    """Share of the predicted step in which the busiest device is idle: another order can gain at most this."""
    assert plan.prediction is not None
    return plan.prediction.bubble_ratio
