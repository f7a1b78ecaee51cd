"""Join each I that is directly followed by its own W into a B, if the step does not get longer."""

from ...evaluate.coding import INFINITY, KINDS
from ...schedules.construction.shifts import join
from ..problem.buffers import Buffers
from ..problem.candidate import Candidate
from ..problem.setting import Setting
from .anneal import step_of

ROUNDING = 1e-12
"""Share of the step by which a longer one counts as equal."""


def join_split_backwards(setting: Setting, candidate: Candidate, buffers: Buffers) -> None:
    """Join the backwards of all microbatches of a stage; if that is slower, try each half of the microbatches.

    Args:
        setting: of the candidate.
        candidate: its orders are changed in place.
        buffers: with the costs of its stages.
    """
    count = setting.microbatches
    buffers.work[:] = 0.0  # only used to end a run early, which is not needed here

    def step() -> float:
        return float(step_of(count, INFINITY, candidate, setting.machine, buffers))

    least = step()
    ranges = [(stage, 0, count) for stage in range(len(candidate.placement))]
    while ranges:
        stage, first, last = ranges.pop()
        device = candidate.placement[stage]
        row, length = candidate.orders[device].copy(), int(candidate.lengths[device])
        codes = KINDS * (stage * count + first), KINDS * (stage * count + last)
        candidate.lengths[device] = join(candidate.orders[device], length, *codes)
        if candidate.lengths[device] == length:
            continue
        now = step()
        if 0 <= now <= least * (1 + ROUNDING):
            least = min(least, now)
            continue
        candidate.orders[device], candidate.lengths[device] = row, length
        if last - first > 1:
            middle = (first + last) // 2
            ranges += [(stage, first, middle), (stage, middle, last)]
