"""Free placement: every operator is a stage of its own and may be on any device; then stages are joined again.

The order of a plan's operators is at least as fast as the order of its stages and holds no more, because each of their
actions is a sequence of the operators' actions. It has more freedom: operators move between devices one by one, so
devices get unequal numbers of stages, in any order along the pipeline.
"""

import numpy as np

from ...evaluate.coding import BOTH, FORWARD, INPUT, KINDS, WEIGHT, order_arrays
from ..problem.candidate import Candidate
from .walk import Walk

ROUNDING = 1e-9
"""Share of the step by which a longer one counts as equal."""


def refined(walk: Walk) -> Walk:
    """The walk with one stage for each operator."""
    candidate, count = walk.best, walk.setting.microbatches
    sizes, cuts = np.diff(candidate.cuts), candidate.cuts.tolist()
    rows = []
    for row, length in zip(candidate.orders, candidate.lengths, strict=True):
        split: list[int] = []
        for code in row[:length].tolist():
            kind, (stage, microbatch) = code & 3, divmod(code >> 2, count)
            operators = range(cuts[stage], cuts[stage + 1])
            for operator in operators if kind == FORWARD else reversed(operators):
                first = KINDS * (operator * count + microbatch)
                split += (first + INPUT, first + WEIGHT) if kind == BOTH else (first + kind,)
        rows.append(split)
    orders, lengths = order_arrays(rows, 3 * cuts[-1] * count)
    stages = np.arange(cuts[-1] + 1)
    new = Candidate(
        np.repeat(candidate.placement, sizes), stages, np.repeat(candidate.recompute, sizes), orders, lengths
    )
    return _with(walk, new)


def joined(walk: Walk) -> Walk:
    """The walk with neighbouring stages of a device joined where the step does not get longer."""
    best, stage = walk, 0
    while stage + 1 < len(best.best.placement):
        placement, recompute = best.best.placement, best.best.recompute
        if placement[stage] == placement[stage + 1] and recompute[stage] == recompute[stage + 1]:
            found = next((each for each in _joined_at(best, stage) if _no_worse(each, best)), None)
            if found is not None:
                best.free_buffers()
                best = found
                continue
        stage += 1
    return best


def _joined_at(walk: Walk, stage: int) -> list[Walk]:
    """The walk with a stage joined with the next one: both actions run at the place of the later or the earlier one."""
    candidate, count = walk.best, walk.setting.microbatches
    device = candidate.placement[stage]
    result = []
    for late in (True, False):
        rows = [row[:length].tolist() for row, length in zip(candidate.orders, candidate.lengths, strict=True)]
        seen: set[int] = set()
        kept: list[int] = []
        for code in reversed(rows[device]) if late else rows[device]:
            own = (code >> 2) // count
            joint = code - KINDS * count * (own == stage + 1)
            if own in (stage, stage + 1) and joint in seen:
                continue
            seen.add(joint)
            kept.append(joint)
        rows[device] = kept[::-1] if late else kept
        fewer = KINDS * count
        rows = [[code - fewer * ((code >> 2) // count > stage) for code in row] for row in rows]
        orders, lengths = order_arrays(rows, candidate.orders.shape[1])
        without = np.delete(np.arange(len(candidate.placement)), stage + 1)
        cuts = np.delete(candidate.cuts, stage + 1)
        result.append(
            _with(walk, Candidate(candidate.placement[without], cuts, candidate.recompute[without], orders, lengths))
        )
    return result


def _no_worse(new: Walk, old: Walk) -> bool:
    new.evaluate()
    return 0 <= new.step_s <= old.step_s * (1 + ROUNDING) and new.excess <= old.excess


def _with(walk: Walk, candidate: Candidate) -> Walk:
    """The walk with another candidate, not yet evaluated."""
    chunks = -(-len(candidate.placement) // walk.setting.devices)
    return Walk(walk.setting, walk.schedule, chunks, candidate, walk.offload, walk.annealed, walk.recomputes)
