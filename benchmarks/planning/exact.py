"""Whether a plan with at most some step exists for a small graph: by enumeration of placements and of their orders.

1. All placements of the operators on equal devices are enumerated. Most have a lower bound above the step.
2. Each other placement is searched for an order, smallest bound first; `order_search` finds one, or that there is
   none. Narrow searches of all placements come first, as any plan is an answer.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attrs import frozen

from benchmarks.planning.order_search import OrderSearch
from benchmarks.planning.placed import Placed, placements
from benchmarks.planning.small_cases import Case

WIDTHS = (100, 1_000, 10_000)
"""States after the same number of actions that the first searches keep."""


@frozen
class Answer:
    """Whether some step is possible.

    Args:
        step_s: of a plan that was found; None without one.
        open: number of placements for which there is no answer within the limit; a plan may exist if there are any.
    """

    step_s: int | None
    open: int = 0


def fastest_within(case: Case, horizon: int, most: int) -> Answer:
    """A plan with a step of at most ``horizon`` seconds, or that there is none.

    Args:
        case: with whole numbers of seconds.
        horizon: the longest step.
        most: states that a search may have after the same number of actions.
    """
    left = [OrderSearch(placed) for placed in candidates(case, horizon)]
    for width in (*(width for width in WIDTHS if width < most), most):
        still = []
        for search in left:
            found = search.order_within(horizon, width)
            if found.step_s is not None:
                return Answer(found.step_s)
            if not found.complete:
                still.append(search)
        left = still
    return Answer(None, len(left))


def candidates(case: Case, horizon: int) -> list[Placed]:
    """The placements whose lower bound is at most ``horizon``, smallest first."""
    placed = (Placed(case, device_of) for device_of in placements(len(case.graph.nodes), len(case.cluster.devices)))
    found = [(each.bound_s, each.device_of, each) for each in placed if each.bound_s <= horizon]
    return [each for *_, each in sorted(found, key=lambda item: item[:2])]
