"""When gradients are summed over replicas and the optimizer has stepped, where nothing contends.

The analytic side of what the simulator does: over the same devices the reductions run one after another, in the order
in which the stages' last backwards end, each as long as its collective takes alone; a stage's optimizer step waits for
its own, and a device steps its stages in order.
"""

from collections.abc import Callable, Sequence

from .actions import Kind
from .cluster import Cluster
from .collectives import collective_s
from .costs import StageCosts
from .plan import Plan

ReductionTime = Callable[[int], float]
"""Seconds that the reduction of a stage's gradients over its replicas takes alone."""


def reduction_time(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> ReductionTime:
    """The time of a stage's reduction by the collective that is fastest alone.

    Args:
        plan: its mesh and placement.
        costs: per stage; their ``gradient_bytes`` are summed.
        cluster: its devices in the order of ranks (``Mesh.arrange``).
    """

    def seconds(stage: int) -> float:
        ranks = range(plan.placement[stage], plan.mesh.ranks, plan.devices)
        return collective_s(cluster, ranks, costs[stage].gradient_bytes)

    return seconds


def step_ends(
    plan: Plan,
    costs: Sequence[StageCosts],
    ends: Sequence[Sequence[Sequence[float]]],
    reduction: ReductionTime,
) -> list[float]:
    """When each device along the pipeline is done with its optimizer steps, in seconds.

    Args:
        plan: its compute orders.
        costs: per stage; their ``optimizer_s`` are used.
        ends: per replica and device the ends of its compute actions.
        reduction: time of a stage's reduction; not asked for where there is one replica.
    """
    result = []
    for device, actions in enumerate(plan.device_actions):
        last = {action.stage: at for at, action in enumerate(actions) if action.kind in (Kind.B, Kind.W)}
        summed = dict.fromkeys(last, 0.0)
        free = 0.0
        for stage, at in sorted(last.items(), key=lambda item: item[1]):
            if plan.mesh.data > 1:
                free = max(free, *(replica[device][at] for replica in ends)) + reduction(stage)
            summed[stage] = free
        now = max(replica[device][-1] if replica[device] else 0.0 for replica in ends)
        for held in plan.stages_on(device):
            now = max(now, summed.get(held.index, 0.0)) + costs[held.index].optimizer_s
        result.append(now)
    return result
