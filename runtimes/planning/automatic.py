"""Planning on the machine at hand: measure operators, cut, measure the resulting stages, choose schedules.

1. Every device times the operators, all at once; the mean counts. The time that a message takes of the devices at its
   ends is measured while they compute.
2. For each number of stages per device, cuts are searched with these times. A regular cut
   (`suggestions/regular_cuts`) is preferred unless the searched one is predicted to gain more than ``LEAST_GAIN``: the
   regular cut is the same in the next run. More stages are not tried if devices are idle for at most ``ALIKE`` of the
   step: their gain would be noise.
3. Every device compiles and times its stages of each cut: programs of whole stages, not sums of operators. They correct
   the times of 1. If these give another cut that is predicted to gain more than ``LEAST_RECUT_GAIN``, it is measured.
4. Schedules are chosen with the times of 3; those that differ in time or memory are candidates (see `rehearsal`).
"""

import time
from collections.abc import Sequence

from attrs import Factory, evolve, field, frozen

from ...core import ratios
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
from ...core.search.suggestions.preference import ALIKE
from ..batch.example import Example
from ..launch.progress import Report, silent
from ..launch.team import Team
from ..optimizer.optimizers import OptimizerFactory
from ..profile.measured_cluster import measured_cluster
from ..profile.offload_rates import with_hosts
from ..programs.options import ProgramOptions
from .budget import Budget
from .cuts import CutSearch
from .measurements import Measurements
from .options import PlanningOptions

LEAST_TURNS = 4
"""Number of turns in which plans are rehearsed before any is dropped; each has run once before."""
PLAIN = "1f1b"
"""The schedule that is always rehearsed: others must be faster."""


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
        budget: time and evaluations; by default only the number of evaluations is limited.

    Attributes:
        measured: the measured times of the model.
    """

    example: Example
    microbatches: int
    team: Team
    options: PlanningOptions
    optimizer: OptimizerFactory | None = None
    programs: ProgramOptions = field(factory=ProgramOptions)
    report: Report = silent
    budget: Budget = field(default=Factory(lambda planning: Budget(planning.team), takes_self=True))
    measured: Measurements = field(
        default=Factory(
            lambda planning: Measurements(
                planning.example,
                planning.team,
                planning.optimizer,
                planning.programs,
                planning.report,
                planning.budget.allows,
            ),
            takes_self=True,
        ),
        init=False,
    )

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
        times = (node.forward_s + node.backward_input_s + node.backward_weight_s for node in graph.nodes)
        self.budget.expect_step(self.microbatches * sum(times) / self.team.size)
        found: list[Plan] = []
        took_s = 0.0
        failure: PanpipeError | None = None
        for chunks in range(1, self._max_chunks + 1):
            if found and max(map(efficiency, found)) >= 1 - ALIKE:
                break
            # Another number of stages takes as long to compile and to time as the one before: it is the same model. Its
            # plan is useful only if there is time left to compare it with another one.
            compared_s = 2 * (1 + LEAST_TURNS) * min(map(step_s, found), default=0.0)
            if found and not self.budget.allows(f"{chunks} stages a device", took_s + compared_s):
                break
            start = time.monotonic()
            try:
                found += self._plans_of(chunks, graph, cluster)
            except InfeasibleError as error:
                failure = error
            except RequestError as error:
                failure = failure or error
            took_s = time.monotonic() - start
        if not found:
            raise failure or RequestError(
                f"no schedule supports {devices} devices and {self.microbatches} microbatches: give other numbers"
            )
        return found

    def cuts(self, cluster: Cluster) -> CutSearch:
        """The search for cuts on a machine."""
        return CutSearch(self.measured, cluster, self.microbatches, self.options, self.budget)

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
        stages = cuts.search(graph, chunks)
        if stages is None:
            return []
        self.report(f"measuring {count} stages", done + 1, total)
        costs = self.measured.costs_of(stages)
        if self.budget.allows("correcting cuts by measured stages"):
            other = cuts.corrected(graph, stages, costs)
            if other != stages:
                self.report(f"measuring {count} stages on another cut", done + 1, total)
                stages, costs = other, self.measured.costs_of(other)
        self.report(f"choosing a schedule of {count} stages", done + 2, total)
        return self._choose(graph, cluster, stages, costs)

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
                    options = evolve(
                        wanted,
                        anneal=anneal,
                        budget=self.budget.order_evaluations(self.microbatches),
                        seconds=self.budget.left_s,
                    )
                    plans = self._schedules(graph, stages, costs, cluster, options)
                except (InfeasibleError, RequestError):
                    continue
                self.budget.searched(f"the search for the orders of {len(stages)} stages")
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


def efficiency(plan: Plan) -> float:
    """Mean share of the predicted step in which devices compute: more stages can gain at most the rest."""
    assert plan.prediction is not None
    busy = sum(cost.forward_s + cost.full_backward_s for cost in plan.prediction.costs) * plan.microbatches
    return ratios.efficiency(busy, plan.devices, plan.prediction.step_s)


def _bubble(plan: Plan) -> float:
    """Share of the predicted step in which the busiest device is idle: another order can gain at most this."""
    assert plan.prediction is not None
    return plan.prediction.bubble_ratio
