"""A cut beside a given one that sends less.

The search for cuts knows what a message takes on its link, where it hides behind work, and not what it takes the two
devices themselves. That is told apart by trying.
"""

from collections.abc import Iterator, Sequence

from ..costs import stage_costs, stage_edges
from ..graph import OpGraph

REACH = 3
"""Operators by which one cut is moved, at most."""
BUSIER = 1.05
"""How many times as much work the busiest device may get."""
THINNER = 0.8
"""The share of the bytes that must be left, for a cut to be worth trying."""

Stages = tuple[tuple[str, ...], ...]


def thinner_cut(graph: OpGraph, stages: Stages, placement: Sequence[int]) -> Stages | None:
    """The stages with one cut moved by some operators, so that devices send each other the fewest bytes.

    Args:
        graph: with times.
        stages: operators of each, in the order of the graph.
        placement: device of each.

    Returns:
        The stages; None where no cut nearby saves a fifth of the bytes at nearly the same balance.
    """
    busy = _busiest(graph, stages, placement) * BUSIER
    near = [other for other in _moved(stages) if _busiest(graph, other, placement) <= busy]
    best = min(
        near, key=lambda other: (_sent(graph, other, placement), _busiest(graph, other, placement)), default=None
    )
    sent = _sent(graph, stages, placement)
    return best if best is not None and sent > 0 and _sent(graph, best, placement) <= THINNER * sent else None


def _moved(stages: Stages) -> Iterator[Stages]:
    for left in range(len(stages) - 1):
        both = stages[left] + stages[left + 1]
        middle = len(stages[left])
        for cut in range(max(1, middle - REACH), min(len(both) - 1, middle + REACH) + 1):
            if cut != middle:
                yield (*stages[:left], both[:cut], both[cut:], *stages[left + 2 :])


def _busiest(graph: OpGraph, stages: Stages, placement: Sequence[int]) -> float:
    busy: dict[int, float] = {}
    for device, cost in zip(placement, stage_costs(graph, stages), strict=True):
        busy[device] = busy.get(device, 0.0) + cost.forward_s + cost.full_backward_s
    return max(busy.values())


def _sent(graph: OpGraph, stages: Stages, placement: Sequence[int]) -> float:
    edges = stage_edges(graph, stages)
    return sum(edge.bytes for edge in edges if placement[edge.src] != placement[edge.dst])
