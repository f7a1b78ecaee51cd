"""Advice to use data parallelism, printed if the model fits on one device."""

from collections.abc import Sequence

from ...core.plan.plan import Plan


def data_parallel_advice(plan: Plan, limits: Sequence[float]) -> str | None:
    """The advice to use data parallelism; None where a device cannot hold the whole model.

    Args:
        plan: with its prediction.
        limits: bytes that each device may use.
    """
    devices = plan.devices * plan.mesh.data
    if plan.devices == 1:
        return "this fits on one device: use DDP, or one process" if devices > 1 else "this is one device: no pipeline"
    if plan.prediction is None or plan.memory.recompute or plan.memory.offload:
        return None
    costs = plan.prediction.costs
    state = sum(cost.state_bytes for cost in costs)
    saved = sum(cost.saved_bytes for cost in costs) + max(cost.workspace_bytes for cost in costs)
    if state + saved > min(limits):
        return None
    return f"this fits on one device, one microbatch at a time: use DDP over {devices} devices if the batch allows it"
