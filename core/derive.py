"""Plans derived from a plan: the same stages in the same order, for fewer microbatches or with other messages.

Leaving out the actions of some microbatches keeps a plan sound. What is left waits for a part of what it waited for
before, and a part of what has no cycle has none; the actions of a stage still ascend by microbatch.
"""

from collections.abc import Iterable

from attrs import evolve

from .costs import StageEdge
from .errors import RequestError
from .plan import Plan


def first_microbatches(plan: Plan, count: int) -> Plan:
    """The plan for its first microbatches alone; without a prediction, which was made for all of them.

    Args:
        plan: a sound plan.
        count: how many are left, from 1 to the plan's.

    Raises:
        RequestError: the plan does not have so many.
    """
    if not 1 <= count <= plan.microbatches:
        raise RequestError(f"{count} microbatches of a plan for {plan.microbatches}: give 1 to {plan.microbatches}")
    if count == plan.microbatches:
        return plan
    orders = tuple(
        tuple(a for a in actions if a.microbatch is not None and a.microbatch < count)
        for actions in plan.device_actions
    )
    return evolve(plan, microbatches=count, device_actions=orders, prediction=None)


def with_edges(plan: Plan, edges: Iterable[StageEdge]) -> Plan:
    """The plan with other messages between its stages, to be validated; itself where the same stages talk.

    Args:
        plan: a plan.
        edges: what the stages send each other.
    """
    wanted = tuple(sorted(edges, key=lambda edge: (edge.src, edge.dst)))
    return plan if _talking(wanted) == _talking(plan.edges) else evolve(plan, edges=wanted, prediction=None)


def _talking(edges: Iterable[StageEdge]) -> set[tuple[int, int, bool]]:
    return {(edge.src, edge.dst, edge.gradient_bytes > 0) for edge in edges}
