"""A regular cut: one that tomorrow's measurements give again.

A search for cuts follows measured times to the last operator, so two runs on one machine cut at different operators for
a gain that neither could measure. A regular cut depends on the times as little as it can:

1. It cuts only where no position nearby sends less, such as between the halves of a transformer's layers.
2. No stage takes more than ``SLACK`` times what the longest stage of the best such cut takes.
3. Of what is left it takes the one whose stages have numbers of operators that are most alike.

The best one of 2 minimizes the longest stage (the chain partition problem; by dynamic programming over the positions).
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from attrs import evolve

from ...cluster.cluster import Cluster
from ...costs.costs import stage_costs, stage_edges
from ...costs.graph import OpGraph
from ...costs.message_times import MessageLine, with_message_times
from ...plan.plan import Plan
from ...schedules.problem import Schedule
from ..problem.assemble import assemble, with_replicas
from ..problem.score import Oracle, Score

NEAR = 3
"""Operators before and after a position within which none sends less."""
SLACK = 1.05
"""How many times the longest stage of the best cut a stage may take. Less than half a layer of twelve."""

Stages = tuple[tuple[str, ...], ...]


def regular_cut(graph: OpGraph, count: int) -> Stages | None:
    """The operators of each stage; None where there are fewer positions than such a cut needs.

    Args:
        graph: with times.
        count: stages.
    """
    ends = np.array([*thin_positions(graph), len(graph.nodes)], dtype=np.int64)
    if count > len(ends):
        return None
    times = np.array([node.forward_s + node.backward_input_s + node.backward_weight_s for node in graph.nodes])
    before = np.concatenate(([0.0], np.cumsum(times)))
    starts = np.concatenate(([0], ends))
    length = before[ends][None, :] - before[starts][:, None]  # of a stage from each start to each end
    size = (ends[None, :] - starts[:, None]).astype(float)
    after = np.arange(len(starts))[:, None] <= np.arange(len(ends))[None, :]
    longest, _ = _partition(np.where(after, length, np.inf), count, np.maximum)
    allowed = after & (length <= SLACK * longest)
    _, places = _partition(np.where(allowed, size**2, np.inf), count, np.add)
    bounds = [0, *(int(ends[place]) for place in places)]
    names = [node.name for node in graph.nodes]
    return tuple(tuple(names[a:b]) for a, b in pairwise(bounds))


def longest_stage_s(graph: OpGraph, stages: Stages) -> float:
    """What the longest stage takes of a microbatch, by the times of its operators."""
    return max(cost.forward_s + cost.full_backward_s for cost in stage_costs(graph, stages))


def thin_positions(graph: OpGraph) -> list[int]:
    """Cuts that send no more than any other nearby, by the number of operators before them."""
    count = len(graph.nodes)
    change = np.zeros(count + 1)
    # A tensor is sent past every operator between its producer and its last reader, once.
    last: dict[tuple[str, int], tuple[int, int]] = {}
    for edge in graph.edges:
        reach, size = last.get((edge.src, edge.tensor), (0, 0))
        last[edge.src, edge.tensor] = max(reach, graph.index[edge.dst]), max(size, edge.bytes)
    for (source, _), (reader, size) in last.items():
        change[graph.index[source] + 1] += size
        change[reader + 1] -= size
    sent = np.cumsum(change)
    return [i for i in range(1, count) if sent[i] <= sent[max(i - NEAR, 1) : min(i + NEAR, count - 1) + 1].min()]


def _partition(weights: "np.ndarray", count: int, join: "np.ufunc") -> tuple[float, list[int]]:
    """The chain of ``count`` stages whose joined weights are least.

    Args:
        weights: [start, end] of a stage; infinite where there is none.
        count: stages; at most as many as there are ends.
        join: how the weights of stages are joined.

    Returns:
        The joined weight, and the number of each stage's end.
    """
    best, chosen = weights[0], []
    for _ in range(count - 1):
        # A stage from start s follows one that ends at end s − 1.
        joined = join(best[:, None], weights[1:])
        chosen.append(np.argmin(joined, axis=0))
        best = joined[chosen[-1], np.arange(weights.shape[1])]
    place = weights.shape[1] - 1
    places = [place]
    for previous in reversed(chosen):
        place = int(previous[place])
        places.append(place)
    return float(best[-1]), places[::-1]


def score_of_cut(
    plan: Plan,
    graph: OpGraph,
    stages: Stages,
    cluster: Cluster,
    oracle: Oracle,
    *,
    message: MessageLine,
    parameter_sizes: Mapping[str, int] | None = None,
) -> Score:
    """What the orders of a plan are worth on another cut into as many stages.

    Args:
        plan: whose orders and recomputation are kept.
        graph: with times.
        stages: operators of each.
        cluster: the machine.
        oracle: scores it.
        message: what a message costs its ends.
        parameter_sizes: bytes of each parameter (see :func:`assemble`).
    """
    edges = stage_edges(graph, stages)
    schedule = Schedule(plan.schedule, plan.placement, plan.microbatches, plan.device_actions)
    other = assemble(graph, stages, schedule, parameter_sizes=parameter_sizes, edges=edges)
    other = evolve(other, mesh=plan.mesh, memory=plan.memory)
    costs = with_message_times(stage_costs(graph, stages), plan.placement, edges, message)
    return oracle(other, with_replicas(graph, costs, other.tied), cluster)
