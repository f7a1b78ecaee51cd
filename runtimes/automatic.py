"""Planning on the machine at hand: measure operators, cut, measure the stages that result, choose the schedule.

1. Every device times every operator, all at once; the mean counts. What a message takes of the devices at its ends is
   measured beside computing.
2. For each number of stages a device, cuts are searched on these times.
3. Every device compiles and times its stages of each cut: their own programs, not sums of operators.
4. A schedule is chosen for each on the times of 3. They also correct the times of 1, and where another cut follows from
   that, it goes through 3 and 4 too. What is predicted to be fastest for each number of stages a device is a candidate
   (see `rehearsal`).
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from ..core.capture.operators import Operators, tensor_bytes
from ..core.cluster import Cluster
from ..core.costs import StageCosts
from ..core.derive import Recompute, recomputed_stages
from ..core.errors import InfeasibleError, RequestError
from ..core.graph import OpGraph
from ..core.message_times import MessageLine
from ..core.plan import Plan
from ..core.planner import Oracle
from ..core.planner.choose import choose_schedule
from ..core.planner.choose import plan as search_plan
from ..core.planner.thinner import thinner_cut
from ..core.schedules.problem import ScheduleFamily
from .budget import Budget
from .compiled import compile_stages
from .compute import compute_device
from .corrected import corrected_graph
from .link_profile import measured_cluster
from .message_profile import measured_message_line
from .microbatches import Microbatch
from .operator_profile import profile_operators
from .optimizers import OptimizerFactory, state_share
from .progress import Report, silent
from .stage_compiler import StageCompiler
from .stage_profile import profile_stages
from .team import Team

CORRECTIONS = 1
"""How often cuts are searched again on times corrected by measured stages, for each number of stages a device."""

Stages = tuple[tuple[str, ...], ...]


@frozen(slots=False)
class Planning:
    """What an automatic plan is made from.

    Args:
        operators: the captured step.
        parameters, buffers: the model's, by qualified name; read, never changed.
        microbatch: a real one.
        microbatches: how many a step has.
        team: the devices.
        families: the schedules to choose among.
        anneal: whether orders may depart from theirs.
        oracle: scores a plan whose stages are measured.
        cut_oracle: scores a plan while cuts are searched; a quick one.
        optimizer: makes each stage's optimizer.
        max_chunks: most stages a device.
        cluster: the machine; measured if None.
        report: called with what is going on.
        recompute: the stages that do; None for those that the planner chooses.
        compiler: compiles what stage programs are made of.
        budget: what may be spent; by default counts alone limit it.
    """

    operators: Operators
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    microbatch: Microbatch
    microbatches: int
    team: Team
    families: Sequence[ScheduleFamily]
    anneal: bool
    oracle: Oracle
    cut_oracle: Oracle
    optimizer: OptimizerFactory | None
    max_chunks: int = 2
    cluster: Cluster | None = None
    report: Report = silent
    recompute: Recompute | None = None
    compiler: StageCompiler | None = None
    budget: Budget = field(default=Factory(lambda planning: Budget(planning.team), takes_self=True))

    def plans(self) -> tuple[list[Plan], OpGraph]:
        """Measure, search and choose.

        Returns:
            The best plan of each number of stages a device, with its prediction, the same on every rank; and the graph
            of measured operators.

        Raises:
            RequestError: the model has fewer operators than there are devices.
            InfeasibleError: nothing fits in memory.
        """
        devices, operators = self.team.size, len(self.operators.graph.nodes)
        if devices > operators:
            raise RequestError(
                f"{devices} stages for {operators} operators: a stage needs at least one; "
                f"use at most {operators} devices"
            )
        if self.recompute is not None:
            recomputed_stages(self.recompute, devices * self.max_chunks)  # refused before anything is measured
        if self.cluster is not None:
            self.team.mesh.check(self.cluster)
        self.report("measuring links")
        cluster = self.cluster or measured_cluster(self.team, self.where)
        self.report("measuring operators")
        graph = self.measured_graph()
        found: list[Plan] = []
        failure: InfeasibleError | None = None
        for chunks in range(1, min(self.max_chunks, operators // devices) + 1):
            if found and not self.budget.allows(f"{chunks} stages a device"):
                break
            try:
                found += sorted(self.plans_for(chunks, graph, cluster), key=step_s)[:1]
            except InfeasibleError as error:
                failure = error
        if not found:
            raise failure or RequestError(
                f"no schedule is made for {devices} devices and {self.microbatches} microbatches"
            )
        return found, graph

    def another(
        self, plan: Plan, programs: Sequence[StageCosts], graph: OpGraph, tried: Sequence[Stages]
    ) -> Plan | None:
        """A plan with as many stages and other cuts that were not tried: those that the costs of the programs of
        ``plan``, rehearsed, speak for, or some nearby that send less."""
        assert plan.prediction is not None
        times = corrected_graph(graph, [stage.nodes for stage in plan.stages], programs)
        cluster, chunks = plan.prediction.cluster, len(plan.stages) // self.team.size
        self.report("cutting on rehearsed times")
        stages = self.cut(times, cluster, chunks)
        if stages is None or stages in tried:
            stages = thinner_cut(times, tuple(stage.nodes for stage in plan.stages), plan.placement)
        if stages is None or stages in tried:
            return None
        costs = self.measured_stages(stages)
        return self.choose(graph, cluster, stages, costs)

    def plans_for(self, chunks: int, graph: OpGraph, cluster: Cluster) -> list[Plan]:
        """Cut, measure, choose; then correct operators' times by the stages' and see whether another cut follows."""
        count = chunks * self.team.size
        plans: list[Plan] = []
        tried: list[Stages] = []
        for number in range(1 + CORRECTIONS):
            if number and not self.budget.allows("correcting cuts by measured stages"):
                break
            self.report(f"cutting into {count} stages")
            stages = self.cut(graph, cluster, chunks)
            if stages is None or stages in tried:
                break
            tried.append(stages)
            self.report(f"measuring {count} stages")
            costs = self.measured_stages(stages)
            plan = self.choose(graph, cluster, stages, costs)
            plans += [plan] if plan is not None else []
            graph = corrected_graph(graph, stages, costs)
        return plans

    def cut(
        self, graph: OpGraph, cluster: Cluster, chunks: int, families: Sequence[ScheduleFamily] | None = None
    ) -> Stages | None:
        """The operators of each stage, so many a device, by one search; the same on every rank.

        Args:
            graph: with times.
            cluster: the machine.
            chunks: stages a device.
            families: the schedules that a cut is good for; those to choose among by default.

        Returns:
            None where no schedule is made for so many stages.
        """
        message = self.message  # measured by all ranks, before one of them searches

        def search() -> Stages | None:
            try:
                found = search_plan(
                    graph, cluster, self.microbatches, families=self.families if families is None else families,
                    anneal=self.anneal, oracle=self.cut_oracle, recompute=self.recompute,
                    budget=self.budget.cut_evaluations(self.microbatches), seconds=self.budget.left_s,
                    min_chunks=chunks, max_chunks=chunks, parameter_sizes=self.sizes, replicas=self.replicas,
                    message=message,
                )  # fmt: skip
                self.budget.searched(f"the search for cuts into {len(found.stages)} stages")
            except RequestError:
                return None
            return tuple(stage.nodes for stage in found.stages)

        return self.team.decide(search)

    def choose(self, graph: OpGraph, cluster: Cluster, stages: Stages, costs: tuple[StageCosts, ...]) -> Plan | None:
        """The plan of measured stages with the schedule that is best for them, the same on every rank.

        Returns:
            None where no schedule is made for these stages or fits.
        """
        message = self.message

        def search() -> Plan | None:
            try:
                plan = choose_schedule(
                    graph, stages, costs, cluster, self.microbatches, families=self.families, anneal=self.anneal,
                    oracle=self.oracle, recompute=self.recompute,
                    budget=self.budget.order_evaluations(self.microbatches), seconds=self.budget.left_s,
                    parameter_sizes=self.sizes, replicas=self.replicas, message=message,
                )  # fmt: skip
                self.budget.searched(f"the search for the orders of {len(stages)} stages")
                return evolve(plan, mesh=self.team.mesh)
            except (InfeasibleError, RequestError):
                return None

        return self.team.decide(search)

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
                self.operators, self.parameters, self.buffers, self.microbatch.leaves, device=self.where[device]
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
        """Costs of stages placed round robin, each from its own programs on its own device, all devices busy."""
        devices = self.team.size
        mine = [i for i in range(len(stages)) if i % devices in self.team.local]
        where = {i: self.where[i % devices] for i in mine}
        compiled = compile_stages(self.operators, stages, mine, where, self.compiler)  # not for threads

        def measure(device: int) -> dict[int, StageCosts]:
            own = {i: compiled.programs[i] for i in mine if i % devices == device}
            return profile_stages(
                own, compiled.layout, self.operators, self.parameters, self.buffers, self.microbatch.leaves,
                self.optimizer, device=self.where[device],
            )  # fmt: skip

        found = self.team.everywhere(measure)
        return tuple(_mean_costs([part[i] for part in found if i in part]) for i in range(len(stages)))

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
