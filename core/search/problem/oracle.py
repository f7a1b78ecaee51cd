"""How good a plan is, by an oracle that the planner is handed; and the planner's own: longest path with pure delays,
and memory without communication buffers."""

from collections.abc import Callable, Sequence
from functools import cache

from attrs import evolve, frozen

from ...cluster.cluster import Cluster
from ...costs.costs import StageCosts
from ...evaluate.host_queue import CollectiveQueue, TimedCopy, device_bytes
from ...evaluate.reduction import collective_seconds, reduction_time, scatter_time, step_ends, sync_time, unshard_time
from ...evaluate.reference import Evaluation, evaluate
from ...offload.host_links import host_links, timed_copies
from ...plan.gradient_reduction import collectives
from ...plan.plan import Plan
from ...plan.sharding import replica_costs, shards_gradients
from ...plan.unsharding import gathered_bytes
from ...ratios import bubble_ratio


@frozen
class Score:
    """An oracle's score of a plan.

    Args:
        step_s: time of one step.
        peak_memory_bytes, peak_saved_bytes: per device: all memory, and saved tensors only.
        bubble_ratio: 1 − the busiest device's compute time ÷ step time.
    """

    step_s: float
    peak_memory_bytes: tuple[float, ...]
    peak_saved_bytes: tuple[float, ...]
    bubble_ratio: float


Oracle = Callable[[Plan, tuple[StageCosts, ...], Cluster], Score]
"""Scores a plan without a prediction, from the costs of its stages on a cluster."""


def longest_path(plan: Plan, costs: tuple[StageCosts, ...], cluster: Cluster) -> Score:
    """Score a plan without contention of transfers (an :data:`Oracle`).

    A message takes the latencies of its path plus its bytes at the rate of the path's slowest link, and delays only its
    reader. On each device the optimizer runs after the last action, with no barrier; with replicas each stage's
    optimizer also waits for the reduction of its gradients, which takes the time of its collective alone. Memory is the
    device's state, its saved tensors, and the workspace of the running stage. Sums of microbatches' gradients are timed
    as the collective alone, and as if all replicas were equally fast.

    Raises:
        RequestError: the plan's orders deadlock.
    """
    cluster = plan.mesh.arrange(cluster)
    copies = _copies(plan, cluster)
    replicas = _replicas(plan, costs, cluster, copies)
    times = replicas[0]
    held = [r for r in range(plan.mesh.ranks) if plan.stages_on(r % plan.devices)]
    sync_s = sync_time(plan, cluster, held) if plan.sync else 0.0
    ends = step_ends(
        plan, costs, [replica.ends for replica in replicas], reduction_time(plan, costs, cluster), sync_s,
        unshard_time(plan, costs, cluster), scatter_time(plan, costs, cluster),
    )  # fmt: skip
    held_by_one = replica_costs(plan, costs)
    peaks = [_peak(plan, costs, held_by_one, device, copies[device]) for device in range(plan.devices)]
    step_s = max(ends)
    return Score(step_s, tuple(peaks), times.peak_memory, bubble_ratio(max(times.busy, default=0.0), step_s))


def _replicas(
    plan: Plan, costs: tuple[StageCosts, ...], cluster: Cluster, copies: list[list[TimedCopy]]
) -> list[Evaluation]:
    """The evaluation of every replica on its devices; replicas with equal message times are evaluated once."""
    place = plan.placement
    pairs = [(place[edge.src], place[edge.dst], edge.bytes) for edge in plan.edges]
    pairs += [(place[edge.dst], place[edge.src], edge.gradient_bytes) for edge in plan.edges]
    seconds = collective_seconds(
        cache(reduction_time(plan, costs, cluster)),
        cache(scatter_time(plan, costs, cluster)),
        cache(unshard_time(plan, costs, cluster)),
    )
    scatters = any(shards_gradients(plan, stage) for stage in range(len(costs)))
    found: dict[tuple[float, ...], Evaluation] = {}
    result = []
    for first in range(0, plan.mesh.ranks, plan.devices):
        hops = {pair: cluster.transfer_s(first + pair[0], first + pair[1], pair[2]) for pair in pairs}
        key = tuple(hops.values())
        if key not in found:
            found[key] = evaluate(
                plan.device_actions, place, costs, edges=plan.edges, hop_s=lambda *pair, hops=hops: hops[pair],
                recompute=plan.memory.recompute, copies=copies, host_queues=plan.memory.host_copy_queues,
                collectives=[
                    CollectiveQueue(actions, collectives(plan, device), seconds)
                    for device, actions in enumerate(plan.device_actions)
                ]
                if scatters
                else (),
            )  # fmt: skip
        result.append(found[key])
    return result


def _copies(plan: Plan, cluster: Cluster) -> list[list[TimedCopy]]:
    """Per device its copies to the host and back, each at the rate that its path has while all devices copy."""
    if not plan.memory.offload:
        return [[] for _ in plan.device_actions]
    links = host_links(plan, cluster).contended()
    return timed_copies(plan.device_actions, plan.placement, plan.memory.offload, links)


def working_bytes(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster, device: int) -> list[float]:
    """Bytes on a device while each action of its compute order runs, without gathered parameters and messages.

    Args:
        plan: its orders, and what it offloads.
        costs: per stage, of the whole stage.
        cluster: its devices in the order of ranks.
        device: its number along the pipeline.
    """
    return _working(plan, costs, replica_costs(plan, costs), device, _copies(plan, cluster)[device])


def _working(
    plan: Plan, costs: Sequence[StageCosts], held_by_one: Sequence[StageCosts], device: int, copies: Sequence[TimedCopy]
) -> list[float]:
    """State, saved tensors and the running action's workspace."""
    actions = plan.device_actions[device]
    state = float(sum(held_by_one[stage.index].state_bytes for stage in plan.stages_on(device)))
    held = device_bytes(actions, costs, plan.memory.recompute, copies)
    return [state + now + costs[a.stage].workspace_bytes for a, (now, _) in zip(actions, held, strict=True)]


def _peak(
    plan: Plan, costs: Sequence[StageCosts], held_by_one: Sequence[StageCosts], device: int, copies: Sequence[TimedCopy]
) -> float:
    """The peak of `_working` and gathered parameters; that of the state on a device without actions."""
    working = _working(plan, costs, held_by_one, device, copies)
    if not working:
        return float(sum(held_by_one[stage.index].state_bytes for stage in plan.stages_on(device)))
    whole = gathered_bytes(plan, held_by_one, device)
    return max(now + more for now, more in zip(working, whole, strict=True))


def by_position(score: Score, devices: int) -> Score:
    """The score with the peaks' maximum over replicas; ``devices`` is the number per replica."""
    peaks, saved = score.peak_memory_bytes, score.peak_saved_bytes
    return evolve(
        score,
        peak_memory_bytes=tuple(max(peaks[position::devices]) for position in range(devices)),
        peak_saved_bytes=tuple(max(saved[position::devices]) for position in range(devices)),
    )


def with_costs(plan: Plan, costs: tuple[StageCosts, ...], oracle: Oracle) -> Plan:
    """The plan with a new prediction from other costs, without the old prediction's measured fields."""
    score = by_position(oracle(evolve(plan, prediction=None), costs, plan.predicted.cluster), plan.devices)
    return evolve(
        plan,
        prediction=evolve(
            plan.predicted,
            costs=costs,
            step_s=score.step_s,
            peak_memory_bytes=score.peak_memory_bytes,
            peak_saved_bytes=score.peak_saved_bytes,
            bubble_ratio=score.bubble_ratio,
            interval_s=None,
        ),
    )


def predicted_again(plan: Plan, changed: Plan, oracle: Oracle) -> Plan:
    """The changed plan; if the plan had a prediction, with a new one from the same costs."""
    prediction = plan.prediction
    if changed is plan or prediction is None:
        return changed
    return with_costs(evolve(changed, prediction=prediction), prediction.costs, oracle)
