"""Cuts of a model into stages: a regular one, and a searched one that is predicted to be faster."""

import math

from attrs import frozen

from ...core.cluster.cluster import Cluster
from ...core.costs.graph import OpGraph
from ...core.errors import RequestError
from ...core.plan.plan import Plan
from ...core.search.choose import plan as search_plan
from ...core.search.problem.blocks import Blocks, Stages
from ...core.search.problem.score import by_position
from ...core.search.search_options import SearchOptions
from ...core.search.suggestions.regular_cuts import regular_cut, score_of_cut
from .measurements import Measurements
from .options import PlanningOptions

LEAST_GAIN = 0.03
"""Share of a step that a searched cut must be predicted to gain over a regular one: the measured times of operators
vary by about as much from one run to the next."""


@frozen
class CutSearch:
    """Searches the stages of a model. All ranks call each method at the same time, and get the same result.

    Args:
        measured: the measured times.
        cluster: the machine.
        microbatches: of a step.
        options: how the plan is searched.
        evaluations: of one search.
    """

    measured: Measurements
    cluster: Cluster
    microbatches: int
    options: PlanningOptions
    evaluations: int

    def search(self, graph: OpGraph, chunks: int) -> list[Stages]:
        """The cuts that are worth comparing, each as the operators of its stages.

        Args:
            graph: with times.
            chunks: number of stages of each device.

        Returns:
            A regular cut, if it fits in memory; and the searched one, if it is predicted to gain more than
            ``LEAST_GAIN`` over that.

        Raises:
            RequestError: no schedule exists for this number of stages, or for these options.
        """
        options, blocks = self.options, self.blocks(graph)
        graph = blocks.joined(graph)
        wanted = SearchOptions(
            families=options.families,
            oracle=options.cut_oracle,
            anneal=options.anneal,
            recompute=options.recompute,
            message=self.measured.message,
            offload=options.offload,
            shard=options.shard,
            min_chunks=chunks,
            max_chunks=chunks,
            budget=self.evaluations,
        )

        def search() -> list[Stages]:
            sizes, replicas = self.measured.sizes, self.measured.replicas
            found = search_plan(
                graph, self.cluster, self.microbatches, wanted, parameter_sizes=sizes, replicas=replicas
            )
            searched = tuple(stage.nodes for stage in found.stages)
            regular = regular_cut(graph, len(searched))
            longer = math.inf if regular is None else self._longer(found, graph, regular)
            if regular is None or longer == math.inf:
                return [searched]
            return [regular] if longer <= 1 + LEAST_GAIN else [regular, searched]

        return [blocks.expanded_stages(stages) for stages in self.measured.team.decide(search)]

    def blocks(self, graph: OpGraph) -> Blocks:
        """The blocks of operators that stay in one stage."""
        return Blocks.of(graph, self.options.boundaries, self.measured.sizes)

    def _longer(self, found: Plan, graph: OpGraph, stages: Stages) -> float:
        """The predicted step of a plan's orders with another cut ÷ its own; infinite if that cut does not fit."""
        oracle, message, sizes = self.options.cut_oracle, self.measured.message, self.measured.sizes
        try:
            searched, other = (
                score_of_cut(found, graph, each, self.cluster, oracle, message=message, parameter_sizes=sizes)
                for each in (tuple(stage.nodes for stage in found.stages), stages)
            )
        except RequestError:  # only the other cut has some message, and the order does not wait for it
            return math.inf
        limits = found.mesh.memory_bytes(self.cluster)
        peaks = by_position(other, found.devices).peak_memory_bytes
        fits = all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
        return other.step_s / searched.step_s if fits else math.inf
