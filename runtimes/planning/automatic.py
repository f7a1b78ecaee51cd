"""Planning on the machine at hand: measure operators, cut, measure the stages that result, choose schedules.

1. Every device times the operators, all at once; the mean counts. What a message takes of the devices at its ends is
   measured while they compute.
2. For each number of stages a device, cuts are searched on these times. A regular cut
   (`suggestions/regular_cuts`) is taken where what is searched is not predicted to gain more than ``WORTH``: it
   is the same one in the next run. More stages are not tried where devices wait for no more than ``ALIKE`` of the step:
   all that they could gain is noise.
3. Every device compiles and times its stages of each cut: their own programs, not sums of operators. They correct the
   times of 1; where another cut follows that is predicted to gain more than ``RECUT``, that one is measured.
4. Schedules are chosen on the times of 3; those that differ in time or memory are candidates (see `rehearsal`).
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from ...core.capture.export.few_operators import refuse_too_few
from ...core.capture.export.operators import Operators, tensor_bytes
from ...core.cluster.cluster import Cluster
from ...core.costs.costs import StageCosts
from ...core.costs.graph import OpGraph
from ...core.costs.message_times import MessageLine
from ...core.errors import InfeasibleError, RequestError
from ...core.plan.derive import recomputed_stages
from ...core.plan.plan import Plan
from ...core.schedules.placement import folded_placement, looped_placement
from ...core.schedules.problem import ScheduleFamily
from ...core.search.choose import choose_schedules
from ...core.search.choose import plan as search_plan
from ...core.search.confirm import SearchResult
from ...core.search.search_options import SearchOptions
from ...core.search.suggestions.preference import ALIKE
from ...core.search.suggestions.regular_cuts import longest_stage_s, regular_cut, score_of_cut
from ..batch.example import Example
from ..devices.compute import compute_device
from ..launch.progress import Report, silent
from ..launch.team import Team
from ..optimizer.optimizers import OptimizerFactory, state_share
from ..profile.corrected import corrected_graph
from ..profile.measured_cluster import measured_cluster
from ..profile.message_profile import measured_message_line
from ..profile.operator_profile import profile_operators
from ..profile.stage_profile import profile_stages
from ..programs.compiled import compile_stages
from ..programs.options import ProgramOptions
from .budget import Budget
from .options import PlanningOptions

WORTH = 0.03
"""Share of a step that a cut which follows measured times must be predicted to gain over a regular one: the times of
operators differ by about as much from one run to the next."""
RECUT = 2 * ALIKE
"""The same for another cut once stages were measured: the times of both are known no better than to ``ALIKE``, and the
other one is compiled and measured, too."""

LEAST_TURNS = 4
"""Turns of rehearsed plans before any is left out; each has run once before."""
PLAIN = "1f1b"
"""The schedule that is rehearsed in any case: what others have to be faster than."""

Stages = tuple[tuple[str, ...], ...]


@frozen(slots=False)
class Planning:
    """What an automatic plan is made from.

    Args:
        example: the model, read and never changed; and its captured step, with a real microbatch.
        microbatches: how many a step has.
        team: the devices.
        options: how the plan is searched.
        optimizer: makes each stage's optimizer.
        programs: how stage programs are derived; a pipeline of the same stages need not derive them again.
        report: called with what is going on.
        budget: what may be spent; by default counts alone limit it.

    Attributes:
        stage_costs: of the programs of the stages that were measured.
    """

    example: Example
    microbatches: int
    team: Team
    options: PlanningOptions
    optimizer: OptimizerFactory | None = None
    programs: ProgramOptions = field(factory=ProgramOptions)
    report: Report = silent
    budget: Budget = field(default=Factory(lambda planning: Budget(planning.team), takes_self=True))
    stage_costs: dict[Stages, tuple[StageCosts, ...]] = field(factory=dict, init=False)

    def plans(self) -> list[Plan]:
        """Measure, search and choose.

        Returns:
            Plans with their predictions, the same on every rank: for each number of stages a device the fastest, and
            those that hold less memory than every faster one.

        Raises:
            RequestError: the model has fewer operators than there are devices.
            InfeasibleError: nothing fits in memory.
        """
        devices = self.team.size
        refuse_too_few(self.operators, devices, devices)
        options = self.options
        if options.recompute is not None:
            recomputed_stages(options.recompute, devices * options.max_chunks)  # refused before anything is measured
        if options.cluster is not None:
            self.team.mesh.check(options.cluster)
        self.report("measuring links")
        cluster = options.cluster or measured_cluster(self.team, self.where)
        self.report("measuring operators")
        graph = self.measured_graph()
        times = (node.forward_s + node.backward_input_s + node.backward_weight_s for node in graph.nodes)
        self.budget.expect_step(self.microbatches * sum(times) / self.team.size)
        found: list[Plan] = []
        took_s = 0.0
        failure: InfeasibleError | None = None
        for chunks in range(1, self.most_chunks + 1):
            if found and max(map(efficiency, found)) >= 1 - ALIKE:
                break
            # Stages of another cut take as long to compile and to time as those before: it is the same model. Their
            # plan is of use only where there is time left to compare it with another one.
            compared_s = 2 * (1 + LEAST_TURNS) * min(map(step_s, found), default=0.0)
            if found and not self.budget.allows(f"{chunks} stages a device", took_s + compared_s):
                break
            begun = time.monotonic()
            try:
                found += self.plans_for(chunks, graph, cluster)
            except InfeasibleError as error:
                failure = error
            took_s = time.monotonic() - begun
        if not found:
            raise failure or RequestError(
                f"no schedule is made for {devices} devices and {self.microbatches} microbatches"
            )
        return found

    @property
    def most_chunks(self) -> int:
        """The most stages a device that the operators are enough for."""
        return min(self.options.max_chunks, len(self.operators.graph.nodes) // self.team.size)

    def plans_for(self, chunks: int, graph: OpGraph, cluster: Cluster) -> list[Plan]:
        """Cut, measure, correct operators' times by the stages', see whether another cut follows, and choose."""
        count = chunks * self.team.size
        done, total = 3 * (chunks - 1), 3 * self.most_chunks
        self.report(f"cutting into {count} stages", done, total)
        stages = self.cut(graph, cluster, chunks)
        if stages is None:
            return []
        self.report(f"measuring {count} stages", done + 1, total)
        costs = self.measured_stages(stages)
        if self.budget.allows("correcting cuts by measured stages"):
            other = self.corrected(chunks, graph, cluster, stages, costs)
            if other != stages:
                self.report(f"measuring {count} stages on another cut", done + 1, total)
                stages, costs = other, self.measured_stages(other)
        self.report(f"choosing a schedule of {count} stages", done + 2, total)
        return self.choose(graph, cluster, stages, costs)

    def corrected(
        self, chunks: int, graph: OpGraph, cluster: Cluster, stages: Stages, costs: Sequence[StageCosts]
    ) -> Stages:
        """The cut that follows from the times of measured stages, where it is worth measuring; else the same one."""
        times = corrected_graph(graph, stages, costs)
        if stages != regular_cut(graph, len(stages)):
            return self.cut(times, cluster, chunks, known=stages) or stages
        other = regular_cut(times, len(stages))
        gain = 0.0 if other is None else longest_stage_s(times, stages) / longest_stage_s(times, other) - 1
        return other if other is not None and gain > RECUT else stages

    def cut(
        self,
        graph: OpGraph,
        cluster: Cluster,
        chunks: int,
        families: Sequence[ScheduleFamily] | None = None,
        known: Stages | None = None,
    ) -> Stages | None:
        """The operators of each stage, by one search; the same on every rank.

        Args:
            graph: with times.
            cluster: the machine.
            chunks: stages a device.
            families: the schedules that a cut is good for; those to choose among by default.
            known: stages that are kept if none are worth another measurement.

        Returns:
            ``known``, a regular cut, or what was searched: the first of them that is not predicted to be slower than
            what was searched by more than ``WORTH``, or, for ``known``, ``RECUT``. None where no schedule is made for
            this many stages.
        """
        wanted = self._search_options(self.options.families if families is None else families)

        def search() -> Stages | None:
            try:
                options = evolve(
                    wanted,
                    oracle=self.options.cut_oracle,
                    min_chunks=chunks,
                    max_chunks=chunks,
                    budget=self.budget.cut_evaluations(self.microbatches),
                    seconds=self.budget.left_s,
                )
                sizes, replicas = self.sizes, self.replicas
                found = search_plan(
                    graph, cluster, self.microbatches, options, parameter_sizes=sizes, replicas=replicas
                )
            except RequestError:
                return None
            self.budget.searched(f"the search for cuts into {len(found.stages)} stages")
            searched = tuple(stage.nodes for stage in found.stages)
            others = [(known, RECUT), (regular_cut(graph, len(searched)), WORTH)]
            return next(
                (each for each, worth in others if each and self._as_good(found, graph, each, cluster, worth)), searched
            )

        return self.team.decide(search)

    def _as_good(self, found: Plan, graph: OpGraph, stages: Stages, cluster: Cluster, worth: float) -> bool:
        """Whether the orders of a plan fit on another cut, and are not slower by more than this share."""
        oracle = self.options.cut_oracle
        try:
            searched, other = (
                score_of_cut(found, graph, each, cluster, oracle, message=self.message, parameter_sizes=self.sizes)
                for each in (tuple(stage.nodes for stage in found.stages), stages)
            )
        except RequestError:  # a message that only the other cut has, in an order that does not wait for it
            return False
        limits = [cluster.devices[device].memory_bytes for device in found.mesh.cluster_devices]
        fits = all(peak <= limit for peak, limit in zip(other.peak_memory_bytes, limits, strict=False))
        return fits and other.step_s <= (1 + worth) * searched.step_s

    def choose(self, graph: OpGraph, cluster: Cluster, stages: Stages, costs: tuple[StageCosts, ...]) -> list[Plan]:
        """Plans of measured stages: the fastest, and those that hold less than every faster one; the same on every
        rank. A schedule as published is preferred to an order that was annealed for these times, unless that one is
        predicted to gain more than ``ALIKE``.

        Returns:
            None at all where no schedule is made for these stages or fits.
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
                    plans = self._schedules(graph, stages, costs, cluster, options).plans
                except (InfeasibleError, RequestError):
                    continue
                self.budget.searched(f"the search for the orders of {len(stages)} stages")
                least = min(map(step_s, found), default=float("inf"))
                found += [plan for plan in plans if not found or step_s(plan) < least / (1 + ALIKE)]
            return [evolve(plan, mesh=self.team.mesh) for plan in found]

        return self.team.decide(search)

    def plain(self, plans: Sequence[Plan]) -> list[Plan]:
        """1F1B on the stages of these plans, where it is to choose, is made for them and fits; at most one."""
        family = next((family for family in self.options.families if family.name == PLAIN), None)
        given = min(plans, key=lambda plan: (len(plan.stages), step_s(plan)))
        prediction = given.prediction
        if family is None or prediction is None:
            return []
        stages, options = tuple(stage.nodes for stage in given.stages), self._search_options([family])

        def build() -> list[Plan]:
            try:
                costs, published = self.stage_costs[stages], evolve(options, anneal=False)
                plan = self._schedules(self.operators.graph, stages, costs, prediction.cluster, published).best
            except (InfeasibleError, RequestError):
                return []
            return [evolve(plan, mesh=self.team.mesh)]

        return self.team.decide(build)

    def _search_options(self, families: Sequence[ScheduleFamily]) -> SearchOptions:
        """How plans are searched among these schedules; all ranks ask for it, which may measure messages."""
        options = self.options
        return SearchOptions(
            families=families,
            oracle=options.oracle,
            anneal=options.anneal,
            recompute=options.recompute,
            message=self.message,
        )

    def _schedules(
        self, graph: OpGraph, stages: Stages, costs: Sequence[StageCosts], cluster: Cluster, options: SearchOptions
    ) -> SearchResult:
        """Schedules of measured stages."""
        sizes, replicas = self.sizes, self.replicas
        return choose_schedules(
            graph, stages, costs, cluster, self.microbatches, options, parameter_sizes=sizes, replicas=replicas
        )

    @property
    def operators(self) -> Operators:
        """The captured step."""
        return self.example.operators

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The model's, by qualified name."""
        return dict(self.example.model.named_parameters())

    @cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        """The model's, by qualified name."""
        return dict(self.example.model.named_buffers())

    @cached_property
    def message(self) -> MessageLine:
        """What a message costs the devices at its ends; measured when it is first asked for, by all ranks at once."""
        self.report("measuring what messages cost")
        return measured_message_line(self.team, self.where)

    @cached_property
    def where(self) -> Mapping[int, torch.device]:
        """Device of this process → the torch device that it computes on."""
        model = compute_device([*self.parameters.values(), *self.buffers.values()])
        return self.team.where or dict.fromkeys(self.team.local, model)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every parameter."""
        return {name: tensor_bytes(parameter) for name, parameter in self.parameters.items()}

    def measured_graph(self) -> OpGraph:
        """The operator graph with times measured on all devices at once; their mean."""
        graphs = self.team.everywhere(
            lambda device: profile_operators(
                self.operators, self.parameters, self.buffers, self.example.microbatch.leaves, device=self.where[device]
            )
        )
        nodes = zip(*(graph.nodes for graph in graphs), strict=True)
        return self._with_state(evolve(graphs[0], nodes=tuple(_mean_node(same) for same in nodes)))

    def _with_state(self, graph: OpGraph) -> OpGraph:
        """The graph with each operator's parameters, gradients and optimizer state as this optimizer has them.

        A gradient stands beside the sum that it is added to: the workspace of its operator.
        """
        trained, seen, nodes = 2 + state_share(self.optimizer), set[str](), []
        for node in graph.nodes:
            own = [name for name in node.parameters if name not in seen]
            seen.update(own)
            gradients = {n: self.sizes[n] for n in node.parameters if self.parameters[n].requires_grad}
            size = sum(self.sizes[n] * (trained if n in gradients else 1) for n in own)
            workspace = max([node.workspace_bytes, *gradients.values()])
            nodes.append(evolve(node, state_bytes=round(size), workspace_bytes=workspace))
        return evolve(graph, nodes=tuple(nodes))

    def measured_stages(self, stages: Stages) -> tuple[StageCosts, ...]:
        """Costs of stages, each from its own programs on a device that it may be on, all devices busy."""
        devices = self.team.size
        chunks = len(stages) // devices
        place = folded_placement(devices, chunks) if chunks == 2 else looped_placement(devices, chunks)
        mine = [i for i in range(len(stages)) if place[i] in self.team.local]
        where = {i: self.where[place[i]] for i in mine}
        # Here, and not in each thread: `known` is one for all of them.
        known, compiler = self.programs.known, self.programs.compiler
        compiled = compile_stages(self.operators, stages, mine, where, compiler, known)

        def measure(device: int) -> dict[int, StageCosts]:
            own = {i: compiled.programs[i] for i in mine if place[i] == device}
            return profile_stages(
                own, compiled.layout, self.operators, self.parameters, self.buffers, self.example.microbatch.leaves,
                self.optimizer, device=self.where[device],
            )  # fmt: skip

        found = self.team.everywhere(measure)
        costs = tuple(_mean_costs([part[i] for part in found if i in part]) for i in range(len(stages)))
        self.stage_costs[stages] = costs
        return costs

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...] | None:
        """Where devices stand, where there are several replicas."""
        return self.team.mesh.replicas if self.team.replicas > 1 else None


def _mean_node(same: Sequence[Any]) -> Any:
    return evolve(
        same[0],
        **{
            name: statistics.fmean(getattr(node, name) for node in same)
            for name in ("forward_s", "backward_input_s", "backward_weight_s")
        },
    )


def _mean_costs(same: Sequence[StageCosts]) -> StageCosts:
    """Costs of one stage, measured in every replica."""
    return evolve(
        same[0],
        forward_s=statistics.fmean(cost.forward_s for cost in same),
        backward_input_s=statistics.fmean(cost.backward_input_s for cost in same),
        backward_weight_s=statistics.fmean(cost.backward_weight_s for cost in same),
        backward_s=statistics.fmean(cost.full_backward_s for cost in same),
        optimizer_s=statistics.fmean(cost.optimizer_s for cost in same),
    )


def step_s(plan: Plan) -> float:
    """The predicted step time."""
    assert plan.prediction is not None
    return plan.prediction.step_s


def efficiency(plan: Plan) -> float:
    """Mean share of the predicted step in which devices compute: what is missing is all that other stages may gain."""
    assert plan.prediction is not None
    busy = sum(cost.forward_s + cost.full_backward_s for cost in plan.prediction.costs) * plan.microbatches
    return busy / (plan.devices * plan.prediction.step_s)


def _bubble(plan: Plan) -> float:
    """Share of the predicted step in which the busiest device computes nothing: no order gains more."""
    assert plan.prediction is not None
    return plan.prediction.bubble_ratio
