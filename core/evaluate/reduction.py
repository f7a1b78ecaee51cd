"""The end of gradient reductions, optimizer steps and gathers of parameters, without contention.

The analytic counterpart of the simulator: over the same devices the reductions run one after another, in the order in
which the stages' last backwards end, each for the time of its collective alone. A stage's optimizer step waits for its
own reduction, and a device steps its stages in order. A sharded stage's parameters are gathered after its step, one
stage after another. The reductions of microbatches, of stages whose replicas share gradients, and gathers within the
step are among these reductions; `host_queue` has what waits for them.
"""

from collections.abc import Callable, Sequence

from ..actions import AT_START, LAST_BACKWARD, Action, Kind
from ..cluster.cluster import Cluster
from ..cluster.collectives import Operation, collective_s
from ..costs.collective_times import CollectiveTimes
from ..costs.costs import StageCosts
from ..plan.gradient_reduction import collectives
from ..plan.plan import Plan
from ..plan.sharding import level_of, replica_costs, shards, shards_gradients, shards_parameters, unsharded_bytes

_NUMBER_BYTES = 8

ReductionTime = Callable[[int], float]
"""Seconds of the reduction of a stage's gradients over its replicas, without contention."""


def reduction_time(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> ReductionTime:
    """The time of a stage's reduction: as measured, or by the algorithm that is fastest without other traffic.

    Args:
        plan: its mesh and placement.
        costs: per stage; their ``gradient_bytes`` are summed.
        cluster: its devices in the order of ranks (``Mesh.arrange``).
    """

    def seconds(stage: int) -> float:
        known = measured(plan, costs, stage).reduce_s
        return _over_replicas_s(plan, cluster, stage, *reduced(plan, costs, stage)) if known is None else known

    return seconds


def measured(plan: Plan, costs: Sequence[StageCosts], stage: int) -> CollectiveTimes:
    """The measured times of a stage's collectives, where its replicas share the same in the plan."""
    found, level = costs[stage].collectives, level_of(plan, stage)
    fits = found is not None and (found.shard, found.replicas) == (level, plan.mesh.data)
    return found if found is not None and fits else CollectiveTimes(level, plan.mesh.data)


def reduced(plan: Plan, costs: Sequence[StageCosts], stage: int) -> tuple[int, Operation]:
    """Bytes of the gradients that a stage's REDUCE_GRAD sums, and how; none where SCATTER_GRAD has summed them."""
    if shards_gradients(plan, stage):
        return 0, Operation.ALL_REDUCE
    return costs[stage].gradient_bytes, Operation.REDUCE_SCATTER if shards(plan, stage) else Operation.ALL_REDUCE


def scatter_time(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> ReductionTime:
    """The time of a SCATTER_GRAD of a stage; arguments as in `reduction_time`."""

    def seconds(stage: int) -> float:
        known, size = measured(plan, costs, stage).scatter_s, costs[stage].gradient_bytes
        return _over_replicas_s(plan, cluster, stage, size, Operation.REDUCE_SCATTER) if known is None else known

    return seconds


def unshard_time(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> ReductionTime:
    """The time in which the parameters of a sharded stage are gathered; arguments as in `reduction_time`."""

    def seconds(stage: int) -> float:
        known, size = measured(plan, costs, stage).gather_s, unsharded_bytes(plan, costs, stage)
        return _over_replicas_s(plan, cluster, stage, size, Operation.ALL_GATHER) if known is None else known

    return seconds


def _over_replicas_s(plan: Plan, cluster: Cluster, stage: int, size_bytes: float, operation: Operation) -> float:
    """Seconds of a collective over the replicas of a stage."""
    ranks = range(plan.placement[stage], plan.mesh.ranks, plan.devices)
    return collective_s(cluster, ranks, size_bytes, operation, sharers=plan.mesh.sharing)


def collective_seconds(
    reduction: ReductionTime, scatter: ReductionTime | None, unshard: ReductionTime | None
) -> Callable[[Action], float]:
    """The time of an action on the collective queue; arguments as of `step_ends`."""
    times = {Kind.REDUCE_GRAD: reduction, Kind.SCATTER_GRAD: scatter, Kind.UNSHARD: unshard}

    def seconds(action: Action) -> float:
        if action.kind is Kind.RESHARD:
            return 0.0
        found = times[action.kind]
        assert found is not None
        return found(action.stage)

    return seconds


def sync_bytes(plan: Plan) -> int:
    """Bytes of the table that stages exchange before they step: overflows, loss scales, and a norm of each gradient.

    They are float64. Each gradient's norm is exchanged separately, once for a tied weight, so that the global norm is
    summed in the model's order under every plan. A plan does not record whether gradients are clipped or only the loss
    is scaled, nor which parameters are trained: the real table lacks the norms of frozen parameters. Stages without
    parameter names have a table without norms.
    """
    names = {name for stage in plan.stages for name in stage.parameters}
    return _NUMBER_BYTES * (2 + len(names))


def sync_time(plan: Plan, cluster: Cluster, ranks: Sequence[int]) -> float:
    """Duration of a SYNC in seconds: messages to one rank and back.

    Each way takes as long as the slowest transfer between two ranks.
    """
    size = sync_bytes(plan)
    ways = (cluster.transfer_s(a, b, size) for a in ranks for b in ranks if a != b)
    return 2 * max(ways, default=0.0)


def step_ends(
    plan: Plan,
    costs: Sequence[StageCosts],
    ends: Sequence[Sequence[Sequence[float]]],
    reduction: ReductionTime,
    sync_s: float = 0.0,
    unshard: ReductionTime | None = None,
    scatter: ReductionTime | None = None,
) -> list[float]:
    """When each device along the pipeline has finished the step, in seconds.

    Args:
        plan: its compute orders.
        costs: per stage, of the whole stage; their ``optimizer_s`` are used.
        ends: per replica and device the ends of its compute actions.
        reduction: time of a stage's reduction; not called with one replica.
        sync_s: duration of the SYNC, if the plan has one.
        unshard: time of an UNSHARD of a stage; needed if there is one.
        scatter: time of a SCATTER_GRAD of a stage; needed if there is one.
    """
    costs = replica_costs(plan, costs)
    gradients = _gradient_ends(plan, ends, collective_seconds(reduction, scatter, unshard))
    if plan.sync:
        release = max(max(now, *summed.values()) for now, summed in gradients if summed) + sync_s
        gradients = [(max(now, release) if summed else now, summed) for now, summed in gradients]
    result = []
    for device, (end, summed) in enumerate(gradients):
        now, gathered = end, 0.0
        for held in plan.stages_on(device):
            now = max(now, summed.get(held.index, 0.0)) + costs[held.index].optimizer_s
            if shards(plan, held.index) and not shards_parameters(plan, held.index):
                assert unshard is not None
                gathered = max(now, gathered) + unshard(held.index)
        result.append(max(now, gathered))
    return result


def _gradient_ends(
    plan: Plan,
    ends: Sequence[Sequence[Sequence[float]]],
    seconds: Callable[[Action], float],
) -> list[tuple[float, dict[int, float]]]:
    """Per device the end of its compute, and of every stage's reduction."""
    result = []
    for device, actions in enumerate(plan.device_actions):
        summed = dict.fromkeys((action.stage for action in actions if action.kind in LAST_BACKWARD), 0.0)
        free = 0.0
        for at, action in collectives(plan, device):
            if at != AT_START:
                free = max(free, *(replica[device][at] for replica in ends))
            free += seconds(action)
            if action.kind is Kind.REDUCE_GRAD:
                summed[action.stage] = free
        now = max(replica[device][-1] if replica[device] else 0.0 for replica in ends)
        result.append((now, summed))
    return result
