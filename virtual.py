"""The simulator as a target of training: it is the clock of simulated devices, and plans for them.

Simulators and runtimes do not import each other. This module connects them: a runtime's instructions run at the times
of the simulator.
"""

from collections.abc import Sequence

from attrs import frozen

from .core.capture.export.operators import Operators, tensor_bytes
from .core.cluster.catalog import required_type
from .core.cluster.cluster import Cluster
from .core.costs.analytic.model import costs_by_type, model_work
from .core.costs.analytic.optimizers import Optimizer
from .core.costs.costs import StageCosts, stage_costs
from .core.costs.graph import OpGraph
from .core.errors import RequestError
from .core.plan.derive import Recompute
from .core.plan.plan import Plan
from .core.schedules.problem import ScheduleFamily
from .core.search.choose import search_plans
from .core.search.problem.workload import Workload, kinds_of
from .core.trace.perform import Perform
from .core.trace.trace import Trace
from .runtimes.engine.clocked import Clock
from .runtimes.launch.progress import Report
from .runtimes.optimizer.optimizers import OptimizerFactory, state_share
from .simulators.oracle import simulated
from .simulators.run import simulate


@frozen
class SimulatedDevices:
    """The devices of a cluster, under the simulator's clock.

    Args:
        cluster: their cluster; that of a plan's prediction if None.
        families: the schedules that an automatic plan chooses from.
        anneal: whether other orders than theirs are searched.
        devices: along the pipeline of an automatic plan; all of the cluster if None.
        max_chunks: the most stages of a device.
        optimizer: it determines the state's size.
        recompute: the stages that recompute in an automatic plan; None to let the planner choose.
    """

    cluster: Cluster | None
    families: Sequence[ScheduleFamily]
    anneal: bool
    devices: int | None
    max_chunks: int
    optimizer: OptimizerFactory | None
    recompute: Recompute | None

    def clock(self, plan: Plan, operators: Operators) -> Clock:
        """The simulator's clock, with the costs of the plan's prediction, or analytic ones (a ``VirtualDevices``)."""
        cluster = self.cluster or (plan.prediction.cluster if plan.prediction is not None else None)
        if cluster is None:
            raise _no_cluster(f"the plan of '{plan.model}' has none")
        plan.mesh.check(cluster)
        costs = self._stage_costs(plan, operators, cluster) if plan.prediction is None else plan.prediction.costs

        def run(plan: Plan, perform: Perform) -> Trace:
            return simulate(plan, costs, cluster, memory=False, perform=perform).trace

        return run

    def planned(self, operators: Operators, microbatches: int, report: Report) -> Plan:
        """A plan with analytic costs (a ``VirtualDevices``)."""
        if self.cluster is None:
            raise _no_cluster("plan='auto' needs one")
        count = len(self.cluster.devices)
        if self.devices is not None and self.devices != count:
            raise RequestError(
                f"mesh has {self.devices} devices and the cluster {count}: a plan for target 'simulator' uses all of "
                f"them; leave mesh out, or give a cluster of {self.devices}"
            )
        report("deriving the costs of operators")
        graphs = self._graphs(operators, self.cluster)
        placed = operators.step.parameters.items()
        work = Workload(
            costs=lambda _: tuple(graphs.values()), batch=microbatches, sizes=(1,),
            kinds=kinds_of(tuple(graphs), self.cluster),
            parameter_sizes={name: tensor_bytes(operators.values[place]) for place, name in placed},
        )  # fmt: skip
        report("planning")
        return search_plans(
            work, self.cluster, families=self.families, anneal=self.anneal, oracle=simulated,
            recompute=self.recompute, max_chunks=self.max_chunks, alternatives=False,
        ).best  # fmt: skip

    def _stage_costs(self, plan: Plan, operators: Operators, cluster: Cluster) -> tuple[StageCosts, ...]:
        """Analytic costs of the stages, each on the type of its own device."""
        graphs = self._graphs(operators, cluster)
        stages = [stage.nodes for stage in plan.stages]
        by_type = {name: stage_costs(graph, stages) for name, graph in graphs.items()}
        arranged = plan.mesh.arrange(cluster)
        return tuple(by_type[required_type(arranged, stage.device).name][stage.index] for stage in plan.stages)

    def _graphs(self, operators: Operators, cluster: Cluster) -> dict[str, OpGraph]:
        types = {kind.name: kind for kind in (required_type(cluster, i) for i in range(len(cluster.devices)))}
        share = state_share(self.optimizer)
        return costs_by_type(model_work(operators), types.values(), optimizer=Optimizer("the step's", round(share)))


def _no_cluster(why: str) -> RequestError:
    return RequestError(f"target 'simulator' has no cluster, and {why}: give cluster=, such as '8xA100-40GB'")
