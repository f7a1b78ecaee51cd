"""Gradients sent early: a backward in two halves that stand next to each other, so that a neighbour waits for one only.

B hands the gradient of its stage's inputs over when all of it is done. I followed at once by W is the same work in the
same place, and the gradient leaves after I. Nothing else moves; whoever waited for the gradient starts a W sooner. In
the drain of a schedule of whole backwards, where every device waits for the one behind it, that takes a W for each hop
off the step (the halves are those of Zero Bubble, section 2).
"""

from collections.abc import Iterator, Sequence

from ..actions import Action, Kind

Orders = tuple[tuple[Action, ...], ...]


def early_gradients(device_actions: Orders, placement: Sequence[int], count: int) -> Orders:
    """The orders with the last ``count`` whole backwards of each stage in halves, where the gradient leaves a device.

    Args:
        device_actions: per device F, I, W and B in order.
        placement: device of every stage.
        count: at least 1.

    Returns:
        The same orders where there is nothing to split.
    """
    leaving = {stage for stage in range(1, len(placement)) if placement[stage - 1] != placement[stage]}
    return tuple(tuple(_halved(order, leaving, count)) for order in device_actions)


def _halved(order: Sequence[Action], leaving: set[int], count: int) -> Iterator[Action]:
    left = {stage: sum(a.kind is Kind.B and a.stage == stage for a in order) for stage in leaving}
    for action in order:
        if action.kind is not Kind.B or action.stage not in leaving:
            yield action
            continue
        if left[action.stage] <= count:
            yield Action(action.stage, Kind.I, action.microbatch)
            yield Action(action.stage, Kind.W, action.microbatch)
        else:
            yield action
        left[action.stage] -= 1
