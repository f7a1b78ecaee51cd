"""The simulator as devices of training (``backend="simulator"``): the clock of simulated devices, and plans for them.

Simulators and runtimes do not import each other. This module connects them: threads run the instructions of a plan,
and the trace of a step is the simulator's.
"""

from attrs import frozen

from .core.analytic.model import costs_by_type, model_work
from .core.analytic.optimizers import Optimizer
from .core.capture.export.operators import Operators, tensor_bytes
from .core.cluster.catalog import required_type
from .core.cluster.cluster import Cluster
from .core.costs.costs import StageCosts, stage_costs
from .core.costs.graph import OpGraph
from .core.errors import RequestError
from .core.numba_cache import compile_notice
from .core.plan.plan import Plan
from .core.search.choose import search_plans
from .core.search.problem.blocks import Blocks
from .core.search.problem.workload import Workload, kinds_of
from .core.search.search_options import SearchOptions
from .core.trace.trace import Trace
from .runtimes.engine.workers import Clock
from .runtimes.launch.launch import mesh_in_simulator
from .runtimes.launch.progress import Report
from .runtimes.options import PipelineOptions
from .runtimes.update.optimizers import state_share
from .simulators.run import simulate


@frozen
class SimulatedDevices:
    """The devices of a cluster, under the simulator's clock.

    Args:
        options: the user's options. If they have no cluster, that of the plan's prediction is used.
    """

    options: PipelineOptions

    def clock(self, plan: Plan, operators: Operators) -> Clock:
        """The simulator's clock, with the costs of the plan's prediction, or analytic ones (a ``VirtualDevices``)."""
        cluster = self.options.planning.cluster or (plan.prediction.cluster if plan.prediction is not None else None)
        if cluster is None:
            raise _no_cluster(f"the plan of '{plan.model}' has none")
        plan.mesh.check(cluster)
        costs = self._stage_costs(plan, operators, cluster) if plan.prediction is None else plan.prediction.costs

        known: dict[str, Trace] = {}

        def run(plan: Plan) -> Trace:
            if plan.hash not in known:
                known[plan.hash] = simulate(plan, costs, cluster).trace
            return known[plan.hash]

        return run

    def planned(self, operators: Operators, report: Report) -> Plan:
        """A plan with analytic costs (a ``VirtualDevices``)."""
        options, mesh = self.options.planning, self.options.mesh
        if options.cluster is None:
            raise _no_cluster("plan='auto' needs one")
        count = len(options.cluster.devices)
        devices = count if mesh is None else mesh_in_simulator(mesh).pipeline
        if devices != count:
            raise RequestError(
                f"mesh has {devices} devices and the cluster {count}: a plan for backend 'simulator' uses all of "
                f"them; leave mesh out, or give a cluster of {devices}"
            )
        report("deriving the costs of operators")
        graphs = self._graphs(operators, options.cluster)
        placed = operators.step.parameters.items()
        sizes = {name: tensor_bytes(operators.values[place]) for place, name in placed}
        blocks = Blocks.of(operators.graph, options.boundaries, sizes)
        blocks.refuse_too_few(devices)
        work = Workload(
            costs=lambda _: tuple(map(blocks.joined, graphs.values())), batch=self.options.microbatches, sizes=(1,),
            kinds=kinds_of(tuple(graphs), options.cluster),
            parameter_sizes=sizes,
        )  # fmt: skip
        report("planning")
        search = SearchOptions(
            families=options.families,
            oracle=options.oracle,
            anneal=options.anneal,
            recompute=options.memory.recompute,
            offload=options.offload,
            max_chunks=options.max_chunks,
            alternatives=False,
        )
        with compile_notice(report):
            return blocks.expanded(search_plans(work, options.cluster, search).best)

    def _stage_costs(self, plan: Plan, operators: Operators, cluster: Cluster) -> tuple[StageCosts, ...]:
        """Analytic costs of the stages, each on the type of its own device."""
        graphs = self._graphs(operators, cluster)
        stages = [stage.nodes for stage in plan.stages]
        by_type = {name: stage_costs(graph, stages) for name, graph in graphs.items()}
        arranged = plan.mesh.arrange(cluster)
        return tuple(by_type[required_type(arranged, stage.device).name][stage.index] for stage in plan.stages)

    def _graphs(self, operators: Operators, cluster: Cluster) -> dict[str, OpGraph]:
        types = {kind.name: kind for kind in (required_type(cluster, i) for i in range(len(cluster.devices)))}
        share = state_share(self.options.training.optimizer)
        return costs_by_type(model_work(operators), types.values(), optimizer=Optimizer("the step's", round(share)))


def _no_cluster(why: str) -> RequestError:
    return RequestError(f"backend 'simulator' has no cluster, and {why}: give devices=, such as '8xA100-40GB'")
