"""The oracle for operator graphs: longest path with pure delays, and memory without communication buffers."""

from ..actions import Kind
from ..cluster import Cluster
from ..costs import StageCosts
from ..evaluate import evaluate
from ..plan import Plan
from .score import Score


def longest_path(plan: Plan, costs: tuple[StageCosts, ...], cluster: Cluster) -> Score:
    """Score a plan where no two transfers contend (an :data:`~.score.Oracle`).

    A message takes the latencies of its path plus its bytes at the rate of the path's slowest link, and delays only
    who reads it. The step ends on each device with its own optimizer time behind its last action, with no barrier.
    Memory is the device's state, the saved tensors that it holds, and the largest workspace of the stage that runs.

    Raises:
        RequestError: the plan's orders deadlock.
    """
    times = evaluate(
        plan.device_actions, plan.placement, costs, edges=plan.edges, hop_s=cluster.transfer_s,
        recompute=plan.memory.recompute,
    )  # fmt: skip
    ends, peaks = [], []
    for device, end in enumerate(times.ends):
        own = [costs[stage.index] for stage in plan.stages_on(device)]
        ends.append((end[-1] if end else 0.0) + sum(cost.optimizer_s for cost in own))
        peaks.append(sum(cost.state_bytes for cost in own) + _working_peak(plan, costs, device))
    step_s = max(ends)
    busiest = max(times.busy, default=0.0)
    return Score(step_s, tuple(peaks), times.peak_memory, 1 - busiest / step_s if step_s else 0.0)


def _working_peak(plan: Plan, costs: tuple[StageCosts, ...], device: int) -> float:
    """The most that saved tensors and the running action's workspace take together."""
    held = peak = 0.0
    for action in plan.device_actions[device]:
        cost, kind = costs[action.stage], action.kind
        again = action.stage in plan.memory.recompute
        if kind is Kind.F:
            held += cost.input_bytes if again else cost.saved_bytes
        elif again and kind is not Kind.W:
            held += cost.saved_bytes - cost.input_bytes
        peak = max(peak, held + cost.workspace_bytes)
        if kind is Kind.B:
            held -= cost.saved_bytes
        elif kind is Kind.I:
            held += cost.created_by_input_bytes - cost.freed_by_input_bytes
        elif kind is Kind.W:
            held -= cost.kept_bytes
    return peak
