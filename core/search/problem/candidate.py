"""A candidate of the search: cuts, placement, orders and recomputation together; and the arrays that annealing needs to
evaluate a move and to undo it, allocated once for all moves.
"""

from typing import NamedTuple

import numpy as np

from ...timing.coding import Floats, Integers
from ...timing.compiled import Scratch, StageArrays


class Candidate(NamedTuple):
    """One choice of cuts, placement, orders and recomputation; moves change its arrays in place.

    Args:
        placement: device of every stage, (stages).
        cuts: number of operators before each stage, and of all, (stages + 1).
        recompute: whether each stage recomputes, (stages).
        orders, lengths: coded orders of every device, with capacity for all backwards to be split.
    """

    placement: Integers
    cuts: Integers
    recompute: "np.ndarray"
    orders: Integers
    lengths: Integers

    def copy(self) -> "Candidate":
        """A copy with its own arrays."""
        return Candidate(*(part.copy() for part in self))


class Buffers(NamedTuple):
    """The arrays of a walk, allocated once for all its moves.

    Args:
        costs: of the stages of the current candidate.
        scratch: for runs.
        work, peaks: per device: time of its actions, and its peak in bytes.
        whole: per stage, the number of its backwards that are not split.
        other_work, other_peaks, other_whole, row, other_row, lengths, cuts, recompute, placement: values after a move,
            or needed to undo it.
        devices: the two devices between which a move has moved stages, (2).
        found: positions on the longest path, (actions, 2).
    """

    costs: StageArrays
    scratch: Scratch
    work: Floats
    peaks: Floats
    whole: Integers
    other_work: Floats
    other_peaks: Floats
    other_whole: Integers
    row: Integers
    other_row: Integers
    lengths: Integers
    cuts: Integers
    recompute: "np.ndarray"
    placement: Integers
    devices: Integers
    found: Integers


def make_buffers(costs: StageArrays, scratch: Scratch, candidate: Candidate) -> Buffers:
    """Buffers for candidates of this size."""
    devices, stages = len(candidate.lengths), len(candidate.placement)
    work, peaks, other_work, other_peaks = (np.zeros(devices) for _ in range(4))
    whole, other_whole = np.zeros((2, stages), dtype=np.int64)
    row, other_row = np.empty((2, candidate.orders.shape[1]), dtype=np.int64)
    found = np.empty((candidate.orders.size, 2), dtype=np.int64)
    return Buffers(
        costs, scratch, work, peaks, whole, other_work, other_peaks, other_whole, row, other_row,
        candidate.lengths.copy(), candidate.cuts.copy(), candidate.recompute.copy(), candidate.placement.copy(),
        np.zeros(2, dtype=np.int64), found,
    )  # fmt: skip
