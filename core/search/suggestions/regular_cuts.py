"""Regular cuts, which another measurement on the same machine reproduces.

A search for cuts follows measured times to the last operator, so two runs on one machine cut at different operators for
a gain that is too small to measure. A regular cut depends on the times as little as possible:

1. It cuts only at positions where no position nearby sends fewer bytes, such as between the halves of a transformer's
   layers.
2. No stage takes longer than ``SLACK`` times the longest stage of the best cut at these positions. The best cut
   minimizes the longest stage (the chain partition problem, solved by dynamic programming over the positions).
3. Among these cuts it is the one whose stages have the most equal numbers of operators.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...costs.costs import stage_costs
from ...costs.graph import OpGraph
from ...costs.partition import boundary_bytes
from ..problem.looped_cuts import prefix_of

NEAR = 3
"""Number of operators before and after a position among which none sends fewer bytes."""
SLACK = 1.05
"""Longest allowed stage ÷ longest stage of the best cut: less than half a layer of twelve."""

Stages = tuple[tuple[str, ...], ...]


def regular_cut(graph: OpGraph, count: int) -> Stages | None:
    """The operators of each stage; None if there are too few positions.

    Args:
        graph: with times.
    """
    ends = np.array([*thin_positions(graph), len(graph.nodes)], dtype=np.int64)
    if count > len(ends):
        return None
    before = np.array(prefix_of(graph))
    starts = np.concatenate(([0], ends))
    length = before[ends][None, :] - before[starts][:, None]  # of a stage from each start to each end
    size = (ends[None, :] - starts[:, None]).astype(float)
    after = np.arange(len(starts))[:, None] <= np.arange(len(ends))[None, :]
    longest, _ = partition_chain(np.where(after, length, np.inf), count, np.maximum)
    allowed = after & (length <= SLACK * longest)
    _, places = partition_chain(np.where(allowed, size**2, np.inf), count, np.add)
    bounds = [0, *(int(ends[place]) for place in places)]
    names = [node.name for node in graph.nodes]
    return tuple(tuple(names[a:b]) for a, b in pairwise(bounds))


def busiest_device_s(graph: OpGraph, stages: Stages, placement: Sequence[int]) -> float:
    """Time of the operators of the busiest device for one microbatch.

    Args:
        graph: with times.
        stages: operators of each.
        placement: device of each.
    """
    times = [0.0] * (max(placement) + 1)
    for device, cost in zip(placement, stage_costs(graph, stages), strict=True):
        times[device] += cost.forward_s + cost.full_backward_s
    return max(times)


def thin_positions(graph: OpGraph) -> list[int]:
    """Positions that send no more bytes than any other nearby; a position is the number of operators before it."""
    count, sent = len(graph.nodes), (0, *boundary_bytes(graph))
    return [i for i in range(1, count) if sent[i] <= min(sent[max(i - NEAR, 1) : min(i + NEAR, count - 1) + 1])]


def partition_chain(weights: "np.ndarray", count: int, join: "np.ufunc") -> tuple[float, list[int]]:
    """The chain of ``count`` stages with the smallest total weight.

    Args:
        weights: of a stage by [start, end]; infinite if it is not allowed.
        join: combines the weights of stages into the total.

    Returns:
        The total weight, and the index of each stage's end.
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
