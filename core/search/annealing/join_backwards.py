"""Join each I that is directly followed by its own W into a B, if the step does not get longer."""

from ...evaluate.coding import INFINITY, KINDS
from ...schedules.construction.shifts import join
from ..problem.place import Buffers, Place
from ..problem.setting import Setting
from .anneal import step_of

ROUNDING = 1e-12


def join_split_backwards(setting: Setting, place: Place, buffers: Buffers) -> None:
    """Join the backwards of all microbatches of a stage; if that is slower, try each half of the microbatches.

    Args:
        setting: of the place.
        place: its orders are changed in place.
        buffers: with the costs of its stages.
    """
    count = setting.microbatches
    buffers.work[:] = 0.0  # only used to end a run early, which is not needed here

    def step() -> float:
        return float(step_of(count, INFINITY, place, setting.machine, buffers))

    least = step()
    ranges = [(stage, 0, count) for stage in range(len(place.placement))]
    while ranges:
        stage, first, last = ranges.pop()
        device = place.placement[stage]
        row, length = place.orders[device].copy(), int(place.lengths[device])
        codes = KINDS * (stage * count + first), KINDS * (stage * count + last)
        place.lengths[device] = join(place.orders[device], length, *codes)
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
