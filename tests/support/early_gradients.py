"""Gradients sent early: B split into I directly followed by W, so that the previous stage waits for I only.

B sends the gradient of its stage's inputs when it has ended. I directly followed by W is the same work at the same
position, and the gradient is sent after I. Nothing else moves; the action that waits for the gradient can start one W
earlier. In the cool-down of a schedule with whole backwards, each device waits for the next one, so this shortens the
step by one W per hop (the split is that of Zero Bubble, section 2).
"""

from collections.abc import Iterator, Sequence

from panpipe.core.actions import Action, Kind

Orders = tuple[tuple[Action, ...], ...]


def early_gradients(device_actions: Orders, placement: Sequence[int], count: int) -> Orders:
    """The orders with the last ``count`` whole backwards split, for each stage that sends its gradient to a device.

    Args:
        device_actions: per device F, I, W and B in order.
        placement: device of every stage.
        count: at least 1.

    Returns:
        The same orders if there is nothing to split.
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
