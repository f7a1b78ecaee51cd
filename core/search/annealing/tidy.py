"""Halves of a backward that stand next to each other become one action again, where the step is no longer for it."""

from typing import Any

from ...evaluate.coding import BOTH, INFINITY, INPUT, WEIGHT
from ...evaluate.compiled import run
from ...numba_cache import njit
from ..problem.place import Bench, Place
from ..problem.setting import Setting

ROUNDING = 1e-12


@njit()
def _joined(order: Any, length: int, first: int, last: int) -> int:
    """Join the halves of one stage's backwards whose codes are from ``first`` to below ``last``; the new length."""
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


def join_halves(setting: Setting, place: Place, bench: Bench) -> None:
    """Join what can be joined: all microbatches of a stage at once, or else of each half of them.

    Args:
        setting: what the place is in.
        place: its orders change.
        bench: with the costs of its stages.
    """
    count, costs, room = setting.microbatches, bench.costs, bench.room
    bench.work[:] = 0.0  # only a bound in front of the run's end, and none is needed

    def step() -> float:
        return float(run(place.orders, place.lengths, count, place.placement, costs, bench.work, INFINITY, room))

    least = step()
    ranges = [(stage, 0, count) for stage in range(len(place.placement))]
    while ranges:
        stage, first, last = ranges.pop()
        device = place.placement[stage]
        row, length = place.orders[device].copy(), int(place.lengths[device])
        codes = 4 * (stage * count + first), 4 * (stage * count + last)
        place.lengths[device] = _joined(place.orders[device], length, *codes)
        if place.lengths[device] == length:
            continue
        now = step()
        if 0 <= now <= least * (1 + ROUNDING):
            least = min(least, now)
            continue
        place.orders[device], place.lengths[device] = row, length
        if last - first > 1:
            middle = (first + last) // 2
            ranges += [(stage, first, middle), (stage, middle, last)]
