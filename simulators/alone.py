"""A step in which no two transfers share a link: by the engine, which takes a fraction of a simulation.

A law in ``tests/core/timing`` is that both agree to 1e-9 where links are not shared.
"""

from collections.abc import Sequence

from ..core.actions import Kind
from ..core.cluster.cluster import Cluster
from ..core.costs.costs import StageCosts, compute_times
from ..core.lowering.lowering import lower
from ..core.lowering.queues import Queues, queues_of
from ..core.plan.kinds import seconds_alone
from ..core.plan.plan import Plan
from ..core.policies.sharding import replica_costs
from ..core.timing.orders import run_alone
from .hosts import DIRECTIONS
from .tensor_sums import tensor_sums


def alone_s(
    plan: Plan, costs: Sequence[StageCosts], cluster: Cluster, update: bool = True, queues: Queues | None = None
) -> float:
    """Seconds of a step of a sound plan, with all its replicas, in which every transfer has the full bandwidth of its
    path.

    Args:
        cluster: its devices in the order of ranks.
        update: whether optimizer steps, and all tasks but host copies, take time.
        queues: of the lowered plan with all its replicas; None to lower it.
    """
    queues = queues or queues_of(plan, lower(plan)).replicated(plan.mesh.data)
    seconds = compute_times(queues.compute, replica_costs(plan, costs))
    for own, sums in zip(seconds, tensor_sums(cluster, queues.compute, costs), strict=False):
        for operation, each in sums.items():
            own[operation] += each.alone_s
    task_s = seconds_alone(queues.tasks, plan, costs, cluster)
    if not update:
        for own, actions in zip(seconds, queues.compute, strict=True):
            own[:] = [0.0 if action.kind is Kind.STEP else s for s, action in zip(own, actions, strict=True)]
        task_s = [s if task.kind in DIRECTIONS else 0.0 for s, task in zip(task_s, queues.tasks, strict=True)]
    return run_alone(plan, queues, seconds, cluster, task_s)[0].step_s
