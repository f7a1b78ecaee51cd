"""The time that the memory limit costs a plan: the fastest published order of its stages without a limit."""

from collections.abc import Iterable, Sequence

import numpy as np

from ...costs.graph import OpGraph, OpNode
from ...plan.plan import Plan
from ...policies.sharding import replica_costs
from ...schedules.problem import ScheduleFamily
from ..annealing.initial_walks import InitialWalks
from ..problem.setting import FixedStages, Setting
from ..search_options import SearchOptions


def unlimited_step_s(plan: Plan, families: Iterable[ScheduleFamily], limits: Sequence[float]) -> float | None:
    """The shortest step among schedules of the plan's stages that do not fit; None if none is shorter than the plan's.

    Times are those of the compiled evaluation, in which a transfer is a pure delay.

    Args:
        families: the schedules to build; those with another placement than the plan's are ignored.
        limits: bytes that each device may hold, by position along the pipeline.
    """
    prediction, mesh = plan.predicted, plan.mesh
    devices = mesh.cluster_devices
    replicas = tuple(devices[first : first + plan.devices] for first in range(0, mesh.ranks, plan.devices))
    names = tuple(stage.nodes for stage in plan.stages)
    setting = Setting(
        (OpGraph(tuple(OpNode(str(stage.index)) for stage in plan.stages)),), prediction.cluster, replicas,
        plan.microbatches, (0,) * len(prediction.cluster.devices), (float("inf"),) * len(prediction.cluster.devices),
        fixed=FixedStages(names, tuple(replica_costs(plan, prediction.costs)), plan.edges),
    )  # fmt: skip
    chunks, extra = divmod(len(plan.stages), plan.devices)
    if extra:
        return None
    if all(holds_all(plan, device, limit) for device, limit in enumerate(limits)):
        return None
    recompute = plan.memory.recompute
    space = SearchOptions(
        families=tuple(families), anneal=False, min_chunks=chunks, max_chunks=chunks, recompute=recompute
    )
    best = prediction.step_s
    for walk in InitialWalks([setting], space).published():
        if tuple(walk.best.placement.tolist()) != plan.placement:
            continue
        walk.evaluate()
        if np.any(np.array(walk.peaks) > np.array(limits)):
            best = min(best, walk.step_s)
    return best if best < prediction.step_s else None


def holds_all(plan: Plan, device: int, limit: float) -> bool:
    """Whether a device can hold all microbatches at once; then its limit excludes no order."""
    costs = replica_costs(plan, plan.predicted.costs)
    own = [costs[stage.index] for stage in plan.stages_on(device)]
    held = sum(cost.state_bytes + plan.microbatches * cost.reserved_bytes for cost in own)
    return held + sum(cost.saved_bytes + cost.workspace_bytes for cost in own) <= limit
