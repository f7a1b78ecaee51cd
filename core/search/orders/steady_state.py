"""Repeat a steady state: the order of a few microbatches in the middle of a schedule is applied to all of them.

Moves of single actions find a good steady state for some microbatches long before they find it for all, because a
pattern of two or three microbatches gains nothing until all microbatches follow it.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ...evaluate.coding import BOTH, FORWARD, INFINITY, INPUT, KINDS, WEIGHT, Floats, Integers
from ...schedules.construction.instance import Instance
from ...schedules.construction.local import makespan_of

GROUPS = (1, 2, 3)
"""Numbers of microbatches in the repeated pattern."""


def repeat_steady_state(task: Instance, orders: Integers, lengths: Integers, most: int) -> tuple[float, Integers, int]:
    """The fastest orders that repeat a few microbatches of the given orders.

    The start and the end of the given orders are kept or replaced; both are tried.

    Args:
        task: the instance of the orders.
        orders, lengths: coded.
        most: largest number of orders to try.

    Returns:
        Makespan, infinite if no such order is valid; the orders; the number of orders tried.
    """
    stages, count = len(task.placement), task.problem.microbatches
    given, scratch = task.for_orders(), task.scratch()
    best, tried = (INFINITY, orders), 0
    if makespan_of(*given, orders, lengths, scratch) == INFINITY:
        return *best, tried
    ends = np.where(scratch.finish < 0, np.nan, scratch.finish).reshape(stages, count, KINDS)
    whole = ~np.isnan(ends[:, 0, BOTH])  # stages that run B, whose I ends with it
    times = np.stack([task.times[FORWARD], np.where(whole, task.backward, task.times[INPUT]), task.times[WEIGHT]])
    begins = np.moveaxis(ends, -1, 0)[:BOTH] - times[:, :, None]
    for due in islice(_repeated(begins, task.problem.devices), most):
        tried += 1
        keys, rows = np.stack([*due, due[INPUT]], axis=-1).reshape(-1), orders.copy()
        for row, length in zip(rows, lengths, strict=True):
            row[:length] = row[:length][np.argsort(keys[row[:length]], kind="stable")]
        value = float(makespan_of(*given, rows, lengths, scratch))
        if value < best[0]:
            best = value, rows
    return *best, tried


def _repeated(begins: Floats, devices: int) -> Iterator[Floats]:
    """When actions are due, (3, stages, microbatches), for each pattern that starts after the first microbatches.

    Either all microbatches repeat the pattern, or those before it and some at the end keep their times.
    """
    count = begins.shape[2]
    each = np.arange(count)
    for group in GROUPS:
        for first in range(max(count // 4 - 1, 0), count - 2 * group + 1):
            period = float(np.nanmean(begins[:, :, first + group] - begins[:, :, first]))
            if period <= 0:
                continue
            turn = each - first
            steady = begins[:, :, first + turn % group] + (turn // group) * period
            for start in (0, first):
                kept_start = np.where(each < start, begins, steady)
                yield kept_start
                for last in (count - devices, count - devices // 2):
                    if first + group < last < count:
                        kept_end = begins + np.nanmean(steady[:, :, last] - begins[:, :, last])
                        yield np.where(each < last, kept_start, kept_end)
