"""When gradients are summed over replicas and the optimizer has stepped, where nothing contends.

The analytic side of what the simulator does: over the same devices the reductions run one after another, in the order
in which the stages' last backwards end, each as long as its collective takes alone; a stage's optimizer step waits for
its own, and a device steps its stages in order.
"""

from collections.abc import Callable, Sequence

from ..actions import Kind
from ..cluster.cluster import Cluster
from ..cluster.collectives import collective_s
from ..costs.costs import StageCosts
from ..plan.plan import Plan

_NUMBER_BYTES = 8

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


def sync_bytes(plan: Plan) -> int:
    """Bytes of the table that stages exchange before they step: overflows, loss scales, and a norm of each gradient.

    They are float64. Norms are exchanged one by one, of a tied weight once, so that the global norm is summed up in the
    model's order under every plan. A plan does not tell whether gradients are clipped or the loss alone is scaled, nor
    which parameters are trained: the real table lacks the norms of those that are not. Stages without names of
    parameters have a table without norms.
    """
    names = {name for stage in plan.stages for name in stage.parameters}
    return _NUMBER_BYTES * (2 + len(names))


def sync_time(plan: Plan, cluster: Cluster, ranks: Sequence[int]) -> float:
    """Seconds that ranks take to agree before they step: to one of them and back, each way as long as the slowest
    transfer between two of them."""
    size = sync_bytes(plan)
    ways = (cluster.transfer_s(a, b, size) for a in ranks for b in ranks if a != b)
    return 2 * max(ways, default=0.0)


def step_ends(
    plan: Plan,
    costs: Sequence[StageCosts],
    ends: Sequence[Sequence[Sequence[float]]],
    reduction: ReductionTime,
    sync_s: float = 0.0,
) -> list[float]:
    """When each device along the pipeline is done with its optimizer steps, in seconds.

    Args:
        plan: its compute orders.
        costs: per stage; their ``optimizer_s`` are used.
        ends: per replica and device the ends of its compute actions.
        reduction: time of a stage's reduction; not asked for where there is one replica.
        sync_s: how long the stages take to agree, where the plan has its steps wait for that.
    """
    gradients = _gradient_ends(plan, ends, reduction)
    if plan.sync:
        release = max(max(now, *summed.values()) for now, summed in gradients if summed) + sync_s
        gradients = [(max(now, release) if summed else now, summed) for now, summed in gradients]
    result = []
    for device, (end, summed) in enumerate(gradients):
        now = end
        for held in plan.stages_on(device):
            now = max(now, summed.get(held.index, 0.0)) + costs[held.index].optimizer_s
        result.append(now)
    return result


def _gradient_ends(
    plan: Plan, ends: Sequence[Sequence[Sequence[float]]], reduction: ReductionTime
) -> list[tuple[float, dict[int, float]]]:
    """Per device the end of its compute, and of every stage's reduction."""
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
        result.append((now, summed))
    return result
