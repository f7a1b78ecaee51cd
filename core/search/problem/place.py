"""A place of the search, cuts and orders and what recomputes, and the bench that moves from it are judged on."""

from typing import NamedTuple

import numpy as np

from ...evaluate.coding import Floats, Integers
from ...evaluate.compiled import Room, StageArrays


class Place(NamedTuple):
    """A place in the search, changed in place.

    Args:
        placement: device of every stage.
        cuts: (stages + 1).
        recompute: per stage.
        orders, lengths: coded orders of every device, with room for all backwards split.
    """

    placement: Integers
    cuts: Integers
    recompute: "np.ndarray"
    orders: Integers
    lengths: Integers

    def copy(self) -> "Place":
        """A place of its own with the same values."""
        return Place(*(part.copy() for part in self))


class Bench(NamedTuple):
    """What a walk works with: made once for many.

    Args:
        costs: of the stages of the present place.
        room: for runs.
        work, peaks: per device: time of its actions, bytes at its peak.
        whole: per stage, how many of its backwards are not split.
        other_work, other_peaks, other_whole, row, lengths, cuts, recompute: what a move brings or has to take back.
        found: (actions, 2).
    """

    costs: StageArrays
    room: Room
    work: Floats
    peaks: Floats
    whole: Integers
    other_work: Floats
    other_peaks: Floats
    other_whole: Integers
    row: Integers
    lengths: Integers
    cuts: Integers
    recompute: "np.ndarray"
    found: Integers


def make_bench(costs: StageArrays, room: Room, place: Place) -> Bench:
    """A bench for places as large as this one."""
    devices, stages = len(place.lengths), len(place.placement)
    work, peaks, other_work, other_peaks = (np.zeros(devices) for _ in range(4))
    whole, other_whole = np.zeros((2, stages), dtype=np.int64)
    row, found = np.empty(place.orders.shape[1], dtype=np.int64), np.empty((place.orders.size, 2), dtype=np.int64)
    return Bench(
        costs, room, work, peaks, whole, other_work, other_peaks, other_whole, row, place.lengths.copy(),
        place.cuts.copy(), place.recompute.copy(), found,
    )  # fmt: skip
