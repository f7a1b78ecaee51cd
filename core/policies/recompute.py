"""Recompute: a stage keeps its inputs alone, and runs its forward again before each backward.

::

    compute queue      0F0 ─ 0F1 ─ ... ─ 0RECOMPUTE0 ─ 0B0 ─ 0RECOMPUTE1 ─ 0B1

RECOMPUTE waits for no message, so it runs while the gradient is still in transit. What it allocates and frees is in
`memory`; compute orders do not hold it, and count it with B or I.
"""

from collections.abc import Container, Iterable, Sequence

from ..actions import BACKWARD_KINDS, Action, Kind
from ..errors import RequestError

Recompute = str | Sequence[int]
"""``"none"``, ``"all"``, or the stages that recompute."""


def recomputed_stages(recompute: Recompute, count: int) -> tuple[int, ...]:
    """The numbers of the stages that recompute.

    Args:
        count: how many stages the plan has.

    Raises:
        RequestError: ``recompute`` is something else, or names a stage that does not exist.
    """
    named = {"none": [], "all": list(range(count))}.get(recompute) if isinstance(recompute, str) else recompute
    named = list(named) if isinstance(named, Iterable) else None
    if named is None or not all(type(stage) is int for stage in named):
        raise RequestError(f"recompute is {recompute!r}: give 'none', 'all', or the numbers of stages")
    strange = next((stage for stage in named if not 0 <= stage < count), None)
    if strange is not None:
        raise RequestError(
            f"recompute names stage {strange}, and the plan has stages 0 to {count - 1}: name those, or give 'all'"
        )
    return tuple(sorted(set(named)))


def with_recompute(actions: Iterable[Action], recompute: Container[int]) -> list[Action]:
    """A compute order with a RECOMPUTE directly before each B or I of these stages."""
    found = []
    for action in actions:
        if action.stage in recompute and action.kind in BACKWARD_KINDS:
            found.append(Action(action.stage, Kind.RECOMPUTE, action.microbatch))
        found.append(action)
    return found
