"""Join each I that is directly followed by its own W into a B, if the step does not get longer."""

from ...evaluate.coding import INFINITY, KINDS
from ...evaluate.compiled import run
from ...schedules.shifts import join
from ..problem.place import Buffers, Place
from ..problem.setting import Setting

ROUNDING = 1e-12


def join_split_backwards(setting: Setting, place: Place, buffers: Buffers) -> None:
    """Join the backwards of all microbatches of a stage; if that is slower, try each half of the microbatches.

    Args:
        setting: of the place.
        place: its orders are changed in place.
        buffers: with the costs of its stages.
    """
    count, costs, scratch = setting.microbatches, buffers.costs, buffers.scratch
    buffers.work[:] = 0.0  # only used to end a run early, which is not needed here

    def step() -> float:
        return float(run(place.orders, place.lengths, count, place.placement, costs, buffers.work, INFINITY, scratch))

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
