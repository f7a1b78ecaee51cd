"""Moves of one action in a coded order: drawing a move, applying it, and finding the actions on the longest path.

Moves that cannot shorten the longest path are drawn rarely (van Laarhoven, Aarts and Lenstra, Job shop scheduling by
simulated annealing, 1992).
"""

from typing import Any

import numpy as np

from ...numba_cache import njit
from ...timing.coding import BOTH, FORWARD, INPUT, WEIGHT
from ...timing.compiled import UNKNOWN


@njit()
def draw_shift(lengths: Any, found: Any, number: int) -> tuple[int, int, int]:
    """A device, a position in its order, and the position that its action should move to.

    Args:
        lengths: how many actions each device has.
        found, number: positions on the longest path (see :func:`critical`).
    """
    reach = 1 + int(-2.0 * np.log(1 - np.random.random()))
    if number > 0 and np.random.random() < 0.8:
        pick = np.random.randint(number)
        d, i = found[pick, 0], found[pick, 1]
        if np.random.random() < 0.5:
            return d, i, max(i - reach, 0)
        return d, i - 1, min(i - 1 + reach, lengths[d] - 1)
    d = np.random.randint(lengths.shape[0])
    if lengths[d] == 0:
        return d, 0, 0
    start = np.random.randint(lengths[d])
    return d, start, min(max(start + (reach if np.random.random() < 0.5 else -reach), 0), lengths[d] - 1)


@njit()
def shift(order: Any, start: int, goal: int, stage_of: Any) -> int:
    """Move the action at ``start`` towards ``goal`` as far as its own stage allows; return its new position."""
    code, i = order[start], start
    kind, stage = code & 3, stage_of[code >> 2]
    step = 1 if goal > start else -1
    while i != goal:
        other = order[i + step]
        if stage_of[other >> 2] == stage and (other >> 2 == code >> 2 or _ordered(kind, other & 3)):
            break
        order[i], order[i + step] = other, code
        i += step
    return i


@njit(inline="always")
def _ordered(a: int, b: int) -> bool:
    """Whether a stage must run actions of these two kinds in the order of the microbatches."""
    return a == b or (a == BOTH and b != FORWARD) or (b == BOTH and a != FORWARD)


@njit()
def critical(orders: Any, lengths: Any, placement: Any, scratch: Any, found: Any) -> int:
    """Positions on the longest path whose action waited for the one before it on its device, into ``found``.

    Args:
        orders, lengths, placement: as in ``compiled.run``.
        scratch: of a run of these orders.
        found: (actions, 2), filled with devices and positions.

    Returns:
        Their number.
    """
    d = int(np.argmax(scratch.free))
    number, i = 0, lengths[d] - 1
    while i >= 0:
        why = scratch.cause[orders[d, i]]
        if why != UNKNOWN:
            d = placement[scratch.stage_of[why >> 2]]
            i = scratch.where[why]
        else:
            if i > 0:
                found[number, 0], found[number, 1] = d, i
                number += 1
            i -= 1
    return number


@njit()
def join(order: Any, length: int, first: int, last: int) -> int:
    """Replace each I directly followed by its own W by a B; return the new length.

    Args:
        order: of a device, changed in place.
        first, last: codes of the actions that may be joined: from the first to below the last.
    """
    to = 0
    for i in range(length):
        code = order[i]
        before = order[to - 1] if to > 0 else -1
        if first <= code < last and code & 3 == WEIGHT and before == code - WEIGHT + INPUT:
            order[to - 1] = code - WEIGHT + BOTH
        else:
            order[to] = code
            to += 1
    return to


@njit(inline="always")
def metropolis(value: float, temperature: float) -> float:
    """The largest value that simulated annealing accepts after this one; the random number is drawn here."""
    return float(value - temperature * np.log(1 - np.random.random()))
