"""The cut of a model into stages: a regular one, unless the measured times of operators say that another is faster."""

from collections.abc import Sequence

from attrs import evolve, frozen

from ...core.cluster.cluster import Cluster
from ...core.costs.costs import StageCosts, stage_costs
from ...core.costs.graph import OpGraph
from ...core.errors import RequestError
from ...core.plan.plan import Plan
from ...core.schedules.problem import ScheduleFamily
from ...core.search.choose import plan as search_plan
from ...core.search.problem.blocks import Blocks, Stages
from ...core.search.problem.score import by_position
from ...core.search.search_options import SearchOptions
from ...core.search.suggestions.preference import ALIKE
from ...core.search.suggestions.regular_cuts import longest_stage_s, regular_cut, score_of_cut
from ..profile.corrected_operators import corrected_graph
from .budget import Budget
from .measurements import Measurements
from .options import PlanningOptions

LEAST_GAIN = 0.03
"""Share of a step that a searched cut must be predicted to gain over a regular one: the measured times of operators
vary by about as much from one run to the next."""
LEAST_RECUT_GAIN = 2 * ALIKE
"""The same for another cut after stages were measured. The times of both cuts are known to about ``ALIKE``, and the
other cut has to be compiled and measured, too."""


@frozen
class CutSearch:
    """Searches the stages of a model. All ranks call each method at the same time, and get the same result.

    Args:
        measured: the measured times.
        cluster: the machine.
        microbatches: of a step.
        options: how the plan is searched.
        budget: of the search.
    """

    measured: Measurements
    cluster: Cluster
    microbatches: int
    options: PlanningOptions
    budget: Budget

    def search(
        self,
        graph: OpGraph,
        chunks: int,
        families: Sequence[ScheduleFamily] | None = None,
        known: Stages | None = None,
    ) -> Stages | None:
        """The operators of each stage.

        Args:
            graph: with times.
            chunks: number of stages of each device.
            families: the schedules that the cut is for; by default those of the options.
            known: measured stages, kept unless another cut gains enough to measure it.

        Returns:
            ``known``, unless the searched cut is predicted to gain more than ``LEAST_RECUT_GAIN`` over it; otherwise a
            regular cut, unless the searched one is predicted to gain more than ``LEAST_GAIN`` over that; otherwise the
            searched cut. None if ``known`` has no schedule any more.

        Raises:
            RequestError: no schedule exists for this number of stages, or for these options.
        """
        options, blocks = self.options, self.blocks(graph)
        graph, known = blocks.joined(graph), known and blocks.joined_stages(known)
        wanted = SearchOptions(
            families=options.families if families is None else families,
            oracle=options.cut_oracle,
            anneal=options.anneal,
            recompute=options.recompute,
            message=self.measured.message,
            offload=options.offload,
            shard=options.shard,
            min_chunks=chunks,
            max_chunks=chunks,
        )

        def search() -> Stages | None:
            try:
                found = search_plan(
                    graph,
                    self.cluster,
                    self.microbatches,
                    evolve(wanted, budget=self.budget.cut_evaluations(self.microbatches), seconds=self.budget.left_s),
                    parameter_sizes=self.measured.sizes,
                    replicas=self.measured.replicas,
                )
            except RequestError:
                if known is None:
                    raise
                return None
            self.budget.searched(f"the search for cuts into {len(found.stages)} stages")
            searched = tuple(stage.nodes for stage in found.stages)
            others = [(known, LEAST_RECUT_GAIN), (regular_cut(graph, len(searched)), LEAST_GAIN)]
            return next((each for each, worth in others if each and self._as_good(found, graph, each, worth)), searched)

        stages = self.measured.team.decide(search)
        return stages and blocks.expanded_stages(stages)

    def blocks(self, graph: OpGraph) -> Blocks:
        """The blocks of operators that stay in one stage."""
        return Blocks.of(graph, self.options.boundaries, self.measured.sizes)

    def corrected(self, graph: OpGraph, stages: Stages, costs: Sequence[StageCosts]) -> Stages:
        """The cut for operator times that are corrected by measured stages; ``stages`` unless another gains enough.

        Args:
            graph: with measured times.
            stages: the measured stages.
            costs: theirs.
        """
        blocks, corrected = self.blocks(graph), corrected_graph(graph, stages, costs)
        times, measured = blocks.joined(corrected), blocks.joined_stages(stages)
        if measured != regular_cut(blocks.joined(graph), len(stages)):
            chunks = len(stages) // self.measured.team.size
            return self.search(corrected, chunks, known=stages) or stages
        other = regular_cut(times, len(stages))
        gain = 0.0 if other is None else longest_stage_s(times, measured) / longest_stage_s(times, other) - 1
        if other is None or gain <= LEAST_RECUT_GAIN or not self._can_measure(times, other):
            return stages
        return blocks.expanded_stages(other)

    def _can_measure(self, graph: OpGraph, stages: Stages) -> bool:
        """Whether every device has the memory of its stages for one microbatch: to measure them takes as much."""
        devices = self.measured.team.size
        limits = self.measured.team.mesh.memory_bytes(self.cluster)
        costs = stage_costs(graph, stages)
        return all(
            sum(cost.state_bytes + cost.reserved_bytes for cost in costs[device::devices])
            + max(cost.workspace_bytes for cost in costs[device::devices])
            <= limit
            for device, limit in enumerate(limits)
        )

    def _as_good(self, found: Plan, graph: OpGraph, stages: Stages, worth: float) -> bool:
        """Whether the orders of a plan fit in memory with another cut, and are at most ``worth`` (a share) slower."""
        oracle, message, sizes = self.options.cut_oracle, self.measured.message, self.measured.sizes
        try:
            searched, other = (
                score_of_cut(found, graph, each, self.cluster, oracle, message=message, parameter_sizes=sizes)
                for each in (tuple(stage.nodes for stage in found.stages), stages)
            )
        except RequestError:  # only the other cut has some message, and the order does not wait for it
            return False
        limits = found.mesh.memory_bytes(self.cluster)
        peaks = by_position(other, found.devices).peak_memory_bytes
        fits = all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
        return fits and other.step_s <= (1 + worth) * searched.step_s
