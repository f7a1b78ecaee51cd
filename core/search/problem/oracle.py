"""How good a plan is, by an oracle that the planner is handed; and the planner's own: longest path with pure delays,
and memory without communication buffers."""

from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from ...actions import Kind
from ...cluster.cluster import Cluster
from ...costs.costs import StageCosts, compute_times
from ...lowering.lowering import lower
from ...lowering.queues import queues_of
from ...lowering.residency import device_timelines
from ...offload.host_links import host_links
from ...plan.items import Task
from ...plan.kinds import movement, seconds_alone
from ...plan.plan import Plan
from ...policies.sharding import replica_costs
from ...ratios import bubble_ratio
from ...timing.engine import Engine, refuse_cycle
from ...timing.orders import busy_s, positions_of, read_inputs


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
    optimizer also waits for the reduction of its gradients, which takes the time of its collective alone. Sums of tied
    weights take no time. Memory is the device's state, its saved tensors, the workspace of the running stage, and
    gathered parameters.

    Raises:
        RequestError: the plan's orders deadlock.
    """
    cluster = plan.mesh.arrange(cluster)
    bare = evolve(plan, edges=(), tied=())  # messages are pure delays: they need no sends and receives
    one = queues_of(bare, lower(bare))
    firsts = _distinct_replicas(plan, cluster)
    queues = one.replicated(len(firsts))
    held = replica_costs(plan, costs)
    seconds = compute_times(queues.compute, held)
    task_s = _task_seconds(plan, costs, cluster, queues.tasks)
    engine = Engine(queues.compute, seconds, tasks=queues.tasks, task_s=task_s)
    rows = [[action for action in actions if action.kind is not Kind.STEP] for actions in one.compute]
    positions = positions_of(rows, plan.placement)
    for number, first in enumerate(firsts):

        def hop_s(src: int, dst: int, size: float, first: int = first) -> float:
            return cluster.transfer_s(first + src, first + dst, size)

        read_inputs(engine, rows, plan.placement, positions, plan.edges, hop_s, number * plan.devices)
    if not engine.run():
        refuse_cycle(engine)
    working = device_timelines(plan, costs, one, engine.operations, {})
    busy = [busy_s(actions, costs, plan.memory.recompute) for actions in plan.device_actions]
    return Score(
        engine.step_s,
        tuple(float(timeline.working.max()) for timeline in working),
        tuple(timeline.peak_saved_bytes for timeline in working),
        bubble_ratio(max(busy, default=0.0), engine.step_s),
    )


def _distinct_replicas(plan: Plan, cluster: Cluster) -> list[int]:
    """The first rank of every replica whose messages take other times than those of the replicas before it."""
    place = plan.placement
    pairs = {(place[edge.src], place[edge.dst], edge.bytes) for edge in plan.edges}
    pairs |= {(place[edge.dst], place[edge.src], edge.gradient_bytes) for edge in plan.edges}
    found: dict[tuple[float, ...], int] = {}
    for first in range(0, plan.mesh.ranks, plan.devices):
        found.setdefault(tuple(cluster.transfer_s(first + src, first + dst, size) for src, dst, size in pairs), first)
    return list(found.values())


def _task_seconds(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster, tasks: Sequence[Task]) -> list[float]:
    """The duration of every task; host copies run at the rate that their paths have while all devices copy."""
    found = seconds_alone(tasks, plan, costs, cluster)
    links = host_links(plan, cluster).contended().links if plan.memory.offload else ()
    for number, task in enumerate(tasks if links else ()):
        link = links[task.items[0].device % plan.devices] if task.kind in (Kind.OFFLOAD, Kind.RELOAD) else None
        if link is not None:
            size = movement(task, plan, costs, cluster).bytes
            found[number] = link.out_s(size) if task.kind is Kind.OFFLOAD else link.back_s(size)
    return found


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
