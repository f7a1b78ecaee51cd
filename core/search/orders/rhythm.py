"""Rhythms: what a few microbatches do in the middle of an order, done by all of them.

Moves of one action at a time find a good rhythm for some microbatches long before they find it for all, because a
rhythm of two or three microbatches is no faster until all of them keep it.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ...evaluate.coding import BOTH, FORWARD, INFINITY, INPUT, KINDS, WEIGHT, Floats, Integers
from ...schedules.instance import Instance
from ...schedules.local import makespan_of

GROUPS = (1, 2, 3)
"""Microbatches of a rhythm."""


def in_rhythm(task: Instance, orders: Integers, lengths: Integers, most: int) -> tuple[float, Integers, int]:
    """The fastest order that a rhythm of these orders gives, its own beginning and end kept or not.

    Args:
        task: what they are for.
        orders, lengths: coded.
        most: orders to try.

    Returns:
        Its makespan and orders, infinite where no rhythm fits; and how many were tried.
    """
    stages, count = len(task.placement), task.problem.microbatches
    given, scratch = task.for_orders(), task.scratch()
    best, tried = (INFINITY, orders), 0
    if makespan_of(*given, orders, lengths, scratch) == INFINITY:
        return *best, tried
    ends = np.where(scratch.finish < 0, np.nan, scratch.finish).reshape(stages, count, KINDS)
    whole = ~np.isnan(ends[:, 0, BOTH])  # their I ends there, too
    times = np.stack([task.times[FORWARD], np.where(whole, task.backward, task.times[INPUT]), task.times[WEIGHT]])
    begins = np.moveaxis(ends, -1, 0)[:BOTH] - times[:, :, None]
    for wishes in islice(_repeated(begins, task.problem.devices), most):
        tried += 1
        keys, rows = np.stack([*wishes, wishes[INPUT]], axis=-1).reshape(-1), orders.copy()
        for row, length in zip(rows, lengths, strict=True):
            row[:length] = row[:length][np.argsort(keys[row[:length]], kind="stable")]
        value = float(makespan_of(*given, rows, lengths, scratch))
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
