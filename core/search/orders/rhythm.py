"""Rhythms: what a few microbatches do in the middle of an order, done by all of them.

Moves of one action at a time find a good rhythm for some microbatches long before they find it for all, because a
rhythm of two or three microbatches is no faster until all of them keep it.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ...evaluate.coding import INFINITY, Floats, Integers
from ...schedules.instance import Instance
from ...schedules.local import ends_of

GROUPS = (1, 2, 3)
"""Microbatches of a rhythm."""


def in_rhythm(
    task: Instance, fused: "np.ndarray", orders: Integers, lengths: Integers, most: int
) -> tuple[float, Integers, int]:
    """The fastest order that a rhythm of these orders gives, its own beginning and end kept or not.

    Args:
        task: what they are for.
        fused, orders, lengths: as in ``decode``.
        most: orders to try.

    Returns:
        Its makespan and orders, infinite where no rhythm fits; and how many were tried.
    """
    stages, count = len(task.placement), task.problem.microbatches
    given = task.for_orders(fused)
    finish = np.empty(3 * stages * count)
    best, tried = (INFINITY, orders), 0
    if ends_of(*given, orders, lengths, finish) == INFINITY:
        return *best, tried
    times = task.fused_times(fused)
    begins = np.where(finish < 0, np.nan, finish).reshape(3, stages, count) - times[:, :, None]
    for wishes in islice(_repeated(begins, task.problem.devices), most):
        tried += 1
        keys, rows = wishes.reshape(-1), orders.copy()
        for row, length in zip(rows, lengths, strict=True):
            row[:length] = row[:length][np.argsort(keys[row[:length]], kind="stable")]
        value = float(ends_of(*given, rows, lengths, finish))
        if value < best[0]:
            best = value, rows
    return *best, tried


def _repeated(begins: Floats, devices: int) -> Iterator[Floats]:
    """When actions are due, (3, stages, microbatches), for every rhythm that begins behind the first fill.

    All microbatches keep it, or those in front of where it was found and some at the end stay as they are.
    """
    count = begins.shape[2]
    each = np.arange(count)
    for group in GROUPS:
        for first in range(max(count // 4 - 1, 0), count - 2 * group + 1):
            period = float(np.nanmean(begins[:, :, first + group] - begins[:, :, first]))
            if period <= 0:
                continue
            turn = each - first
            beat = begins[:, :, first + turn % group] + (turn // group) * period
            for start in (0, first):
                early = np.where(each < start, begins, beat)
                yield early
                for last in (count - devices, count - devices // 2):
                    if first + group < last < count:
                        later = begins + np.nanmean(beat[:, :, last] - begins[:, :, last])
                        yield np.where(each < last, early, later)
