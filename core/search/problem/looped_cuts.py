"""Even cuts for looped pipelines: a loop has one stage per device and is as slow as its slowest stage.

So stages are even within a loop, and loops get equal shares of the work.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ...costs.graph import OpGraph
from ...costs.partition import Cuts

Prefix = tuple[float, ...]
"""Compute time of the nodes before each position."""

BISECTIONS = 30
"""Halvings of the interval for the longest part: to a billionth."""


def prefix_of(graph: OpGraph) -> Prefix:
    """F + I + W of the nodes before each node, and of all nodes."""
    return (0.0, *accumulate(n.forward_s + n.backward_input_s + n.backward_weight_s for n in graph.nodes))


def spread(prefix: Prefix, start: int, end: int, shares: Sequence[float]) -> list[int]:
    """Cut nodes ``start`` to ``end - 1`` into ranges whose compute is near the given shares; none is empty."""
    whole, total = prefix[end] - prefix[start], sum(shares)
    cuts = [start]
    for part, before in enumerate(accumulate(shares[:-1]), start=1):
        wanted = prefix[start] + whole * before / total
        low, high = cuts[-1] + 1, end - (len(shares) - part)
        cuts.append(_nearest(prefix, wanted, low, high))
    return [*cuts, end]


def evened(prefix: Prefix, start: int, end: int, parts: int) -> list[int]:
    """Cut a range into even parts: the longest part is as short as possible, and each cut is as near as possible to the
    middle between its neighbours."""
    cuts = _shortest_longest(prefix, start, end, parts)
    moved = True
    while moved:
        moved = False
        for cut in range(1, parts):
            wanted = (prefix[cuts[cut - 1]] + prefix[cuts[cut + 1]]) / 2
            place = _nearest(prefix, wanted, cuts[cut - 1] + 1, cuts[cut + 1] - 1)
            # Only a strict gain counts, and a gain lowers the sum of squares: the loop ends.
            if abs(prefix[place] - wanted) < abs(prefix[cuts[cut]] - wanted) - 1e-9 * wanted:
                cuts[cut], moved = place, True
    return cuts


def _shortest_longest(prefix: Prefix, start: int, end: int, parts: int) -> list[int]:
    """Cuts whose longest part is as short as possible, by bisection on its length."""
    whole = prefix[end] - prefix[start]
    low, high = whole / parts, whole
    best = _filled(prefix, start, end, parts, most=high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        cuts = _filled(prefix, start, end, parts, most=middle)
        if max(prefix[b] - prefix[a] for a, b in pairwise(cuts)) <= middle:
            best, high = cuts, middle
        else:
            low = middle
    return best


def _filled(prefix: Prefix, start: int, end: int, parts: int, *, most: float) -> list[int]:
    """Fill part after part up to ``most``, leaving an operator for each later part; the last part gets the rest."""
    cuts = [start]
    for left in range(parts - 1, 0, -1):
        place = bisect_right(prefix, prefix[cuts[-1]] + most) - 1
        cuts.append(max(cuts[-1] + 1, min(place, end - left)))
    return [*cuts, end]


def _nearest(prefix: Prefix, wanted: float, low: int, high: int) -> int:
    place = bisect_left(prefix, wanted, low, high + 1)
    places = [p for p in (place - 1, place) if low <= p <= high]
    return min(places, key=lambda p: abs(prefix[p] - wanted))


def looped_cuts(prefix: Prefix, devices: int, loops: int) -> Cuts:
    """Cuts with equal compute for the loops, and even stages within each."""
    nodes = len(prefix) - 1
    bounds = [0]
    for bound in spread(prefix, 0, nodes, [1.0] * loops)[1:-1]:
        left = loops - len(bounds)
        bounds.append(max(bounds[-1] + devices, min(bound, nodes - devices * left)))
    cuts = [0]
    for start, end in zip(bounds, [*bounds[1:], nodes], strict=True):
        cuts += evened(prefix, start, end, devices)[1:]
    return tuple(cuts)
