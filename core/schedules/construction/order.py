"""Building the orders of looped schedules, for one device.

A device with stages s0 < s1 < … runs the microbatches in groups. A group of g microbatches runs forward through
s0, then through s1, and so on; backward it runs through the last stage first. With two stages and groups of two::

    forwards   s0F0 s0F1 s1F0 s1F1 | s0F2 s0F3 s1F2 s1F3 | …
    backwards  s1B0 s1B1 s0B0 s0B1 | s1B2 s1B3 s0B2 s0B3 | …

The last group may extend past the last microbatch: with equal groups, counting alone proves that the merged order has
no deadlock. ``merge`` then removes the microbatches that do not exist; removing actions cannot create a cycle.
"""

from collections.abc import Iterable, Sequence

from ...actions import Action, Kind


def grouped(stages: Sequence[int], kind: Kind, sizes: Sequence[int]) -> list[Action]:
    """Actions of one kind, group by group (of those sizes), each group through ``stages`` in the given order."""
    order: list[Action] = []
    first = 0
    for size in sizes:
        order += [Action(stage, kind, microbatch) for stage in stages for microbatch in range(first, first + size)]
        first += size
    return order


def merge(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int, microbatches: int) -> tuple[Action, ...]:
    """``ahead`` forwards, then one backward and one forward in turn, then the remaining backwards.

    Microbatches from ``microbatches`` on do not exist: they count in ``ahead`` and are removed from the result.
    """
    ahead = min(ahead, len(forwards))
    order = list(forwards[:ahead])
    for backward, forward in zip(backwards, forwards[ahead:], strict=False):
        order += (backward, forward)
    order += backwards[len(forwards) - ahead :]
    return existing(order, microbatches)


def existing(order: Iterable[Action], microbatches: int) -> tuple[Action, ...]:
    """The actions of existing microbatches. Removing actions from an order cannot create a deadlock."""
    return tuple(action for action in order if action.microbatch is not None and action.microbatch < microbatches)
