"""Recompute: a stage keeps its inputs alone, and runs its forward again before each backward.

::

    compute queue      0F0 ─ 0F1 ─ ... ─ 0RECOMPUTE0 ─ 0B0 ─ 0RECOMPUTE1 ─ 0B1

RECOMPUTE waits for no message, so it runs while the gradient is still in transit. What it allocates and frees is in
`memory`; compute orders do not hold it, and count it with B or I.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from ..actions import BACKWARD_KINDS, Action, Kind
from ..errors import RequestError

if TYPE_CHECKING:
    from ..plan.plan import Plan

Recompute = str | Sequence[int]
"""``"none"``, ``"all"``, or the stages that recompute."""


def recomputed_stages(recompute: Recompute, count: int) -> tuple[int, ...]:
    """The numbers of the stages that recompute.

    Args:
        recompute: ``"none"``, ``"all"`` or stage numbers.
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


def check_recompute(plan: Plan, device: int, actions: Sequence[Action]) -> None:
    """Every backward of a stage that recomputes, and of no other, has one RECOMPUTE between it and its F."""
    if not plan.memory.recompute and all(action.kind is not Kind.RECOMPUTE for action in actions):
        return
    forward: set[tuple[int, int | None]] = set()
    recomputed: set[tuple[int, int | None]] = set()
    for action in actions:
        key = action.stage, action.microbatch
        if action.kind is Kind.F:
            forward.add(key)
        elif action.kind is Kind.RECOMPUTE:
            if action.stage not in plan.memory.recompute or key not in forward or key in recomputed:
                raise RequestError(
                    f"device {device} issues {action}: a stage of the plan's memory.recompute "
                    f"({list(plan.memory.recompute)}) recomputes once, after its F; remove it"
                )
            recomputed.add(key)
        elif action.kind in BACKWARD_KINDS and action.stage in plan.memory.recompute and key not in recomputed:
            raise RequestError(
                f"device {device} issues {action}, and stage {action.stage} has nothing saved for it: put "
                f"{Action(action.stage, Kind.RECOMPUTE, action.microbatch)} before it"
            )
