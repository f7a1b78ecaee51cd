"""Moves of one action in a coded order, or in the pattern that a device repeats: drawing a move, applying it, and
finding the actions on the longest path.

Moves that cannot shorten the longest path are drawn rarely (van Laarhoven, Aarts and Lenstra, Job shop scheduling by
simulated annealing, 1992).
"""

from typing import Any, NamedTuple

import numpy as np

from ...numba_cache import njit
from ...timing.coding import BOTH, FORWARD, INPUT, KINDS, WEIGHT, Integers
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


class Pattern(NamedTuple):
    """What every device repeats for each group of microbatches: a cyclic sequence of the first group's actions.

    In repetition n a device runs an action for group n − turn. So the order of all microbatches, warm-up and cool-down
    included, follows from the pattern.

    Args:
        group: number of microbatches; 0 for no pattern.
        ring: per device the actions of a repetition, as codes for ``group`` microbatches,
            (devices, 3 · chunks · group).
        turns: of the actions of ``ring``.
    """

    group: int
    ring: Integers
    turns: Integers


def no_pattern(devices: int) -> Pattern:
    """The pattern of orders that repeat nothing."""
    return Pattern(0, *np.zeros((2, devices, 0), dtype=np.int64))


@njit()
def unroll(pattern: Any, d: int, count: int, order: Any) -> int:
    """Fill the order of all microbatches of device ``d`` from its pattern; return its length."""
    group, ring, turns, length = pattern.group, pattern.ring[d], pattern.turns[d], 0
    for repetition in range(turns.min(), -(-count // group) + turns.max()):
        for i in range(ring.shape[0]):
            code, first = ring[i], (repetition - turns[i]) * group
            place = code >> 2
            stage = place // group
            microbatch = first + place - stage * group
            if first >= 0 and microbatch < count:
                order[length] = KINDS * (stage * count + microbatch) + (code & 3)
                length += 1
    return length


@njit()
def in_order(order: Any, length: int, count: int, stage_of: Any, through: Any) -> bool:
    """Whether every stage runs its microbatches in order, each F before its I and W; ``through`` is (3, stages)."""
    through[:] = 0
    for i in range(length):
        kind, place = order[i] & 3, order[i] >> 2
        stage = stage_of[place]
        microbatch = place - stage * count
        if through[kind, stage] != microbatch or (kind > 0 and through[kind - 1, stage] <= microbatch):
            return False
        through[kind, stage] += 1
    return True


@njit()
def draw_in_pattern(
    pattern: Any, orders: Any, found: Any, number: int, count: int, stage_of: Any
) -> tuple[int, int, int]:
    """A device, a position in its pattern, and by how many positions its action should move; mostly an action on the
    longest path."""
    group, ring = pattern.group, pattern.ring
    reach = 1 + int(-1.5 * np.log(1 - np.random.random()))
    if np.random.random() < 0.5:
        reach = -reach
    if number == 0 or np.random.random() < 0.2:
        return np.random.randint(ring.shape[0]), np.random.randint(ring.shape[1]), reach
    pick = np.random.randint(number)
    d = found[pick, 0]
    code = orders[d, found[pick, 1]]
    stage = stage_of[code >> 2]
    wanted = KINDS * (stage * group + ((code >> 2) - stage * count) % group) + (code & 3)
    i = 0
    while ring[d, i] != wanted:
        i += 1
    return d, i, reach


@njit()
def shift_in_pattern(ring: Any, turns: Any, start: int, reach: int) -> None:
    """Move the action at ``start`` of a device's pattern later (earlier if ``reach`` is negative), past that many
    others of the cycle: so the same action of every group of microbatches moves."""
    width, i = ring.shape[0], start
    step = 1 if reach > 0 else -1
    for _ in range(abs(reach)):
        j = (i + step) % width
        wrapped = step if (j - i) * step < 0 else 0
        ring[i], ring[j] = ring[j], ring[i]
        turns[i], turns[j] = turns[j] - wrapped, turns[i] + wrapped
        i = j
