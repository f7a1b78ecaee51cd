"""Dynamic programming over split points: the best contiguous stages when a stage's cost depends on its range alone.

Everything is O(S·N²), one numpy pass over a table for each stage.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .problem import Cuts, PartitionProblem
from .ranges import Table


def bottleneck(stages: int, size: int, table: Callable[[int], Table]) -> tuple[Cuts, float]:
    """Cuts whose largest cost is the least, and that cost (infinite where nothing is allowed).

    Args:
        stages: how many.
        size: number of nodes.
        table: cost of a stage for every ``[end, start]``; infinite where not allowed.
    """
    return _search(stages, size, table, np.maximum)


def fewest(stages: int, size: int, table: Callable[[int], Table]) -> tuple[Cuts, float]:
    """Cuts whose costs have the least sum, and that sum."""
    return _search(stages, size, table, np.add)


def _search(stages: int, size: int, table: Callable[[int], Table], combine: np.ufunc) -> tuple[Cuts, float]:
    # best[j]: the least cost of the stages so far when they hold the first j nodes.
    best = np.full(size + 1, np.inf)
    best[0] = 0.0 if combine is np.add else -np.inf
    starts: list[npt.NDArray[np.intp]] = []
    rows = np.arange(size + 1)
    empty = np.triu(np.ones((size + 1, size + 1), dtype=bool))  # a stage that ends where it starts, or before
    for stage in range(stages):
        costs = combine(best[None, :], table(stage))
        costs[empty] = np.inf
        choice = costs.argmin(axis=1)
        starts.append(choice)
        best = costs[rows, choice]
    cuts = [size]
    for choice in reversed(starts):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts)), float(best[size])


def least_bottleneck(problem: PartitionProblem) -> Cuts | None:
    """The best cuts with one stage a device, or None where no cuts keep every device within its limit.

    First the least bottleneck, then the fewest bytes among all cuts that have it (give or take ``problem.slack``), then
    the most even stages.
    """
    times = problem.time_tables()

    def time(stage: int) -> Table:
        limit = problem.limits[problem.placement[stage]]
        if problem.whole_bytes(stage) <= limit:
            return times[stage]
        return np.where(problem.memory_table(stage) <= limit, times[stage], np.inf)

    _, largest = bottleneck(problem.stages, problem.tables.size, time)
    if not np.isfinite(largest):
        return None
    most = largest * (1 + problem.slack) + 1e-12 * abs(largest)

    def moved(stage: int) -> Table:
        tables = problem.tables
        size = tables.received_bytes + tables.returned_bytes
        # Sizes are whole bytes, so shares that sum to less than one byte only break ties.
        uneven = 0.5 / problem.stages * (tables.compute_s / max(most, 1e-300)) ** 2
        return np.where(time(stage) <= most, size + uneven, np.inf)

    return fewest(problem.stages, problem.tables.size, moved)[0]


def least_excess(problem: PartitionProblem) -> tuple[Cuts, float]:
    """The cuts, one stage a device, whose worst device is the least above its limit, and by how many bytes."""

    def excess(stage: int) -> Table:
        return problem.memory_table(stage) - problem.limits[problem.placement[stage]]

    return bottleneck(problem.stages, problem.tables.size, excess)
