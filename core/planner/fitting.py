"""Cuts that fit: where even stages hold too much, the evenest whose devices hold what they may."""

from collections.abc import Sequence

import numpy as np

from ..partition import Cuts
from ..schedules.decode import FORWARD, WEIGHT, Floats, Integers
from ..shortcut.path import BOTH
from .costing import SAVED, STATE
from .setting import Setting
from .walk import Walk

BISECTIONS = 20
"""Halvings of the interval for the longest stage."""


def in_flight(orders: Integers, lengths: Integers, stages: int, count: int) -> Integers:
    """Per stage, the most microbatches that its device holds of it at once."""
    most = np.zeros(stages, dtype=np.int64)
    for row, length in zip(orders, lengths, strict=True):
        codes = row[:length]
        kinds, stage_of = codes & 3, (codes >> 2) // count
        for stage in np.unique(stage_of):
            own = kinds[stage_of == stage]
            change = np.where(own == FORWARD, 1, np.where((own == BOTH) | (own == WEIGHT), -1, 0))
            most[stage] = np.cumsum(change).max()
    return most


def fitting_cuts(walk: Walk) -> Cuts | None:
    """The cuts of the shortest longest stage with which no device is above its limit; None where this way finds none.

    Stage after stage takes what its time and its memory allow; the time is found by bisection. With one stage a device
    no cuts are better; with more a device's memory is shared out equally, which may miss some.

    Args:
        walk: a schedule on any cuts.
    """
    setting, place = walk.setting, walk.best
    placement = place.placement.tolist()
    flight = in_flight(place.orders, place.lengths, len(placement), setting.microbatches)
    longest = max(float(setting.arrays.sums[kind, :3, -1].sum()) for kind in set(setting.slowest))
    low, high = 0.0, longest
    best = _filled(setting, placement, flight, high)
    for _ in range(BISECTIONS if best is not None else 0):
        middle = (low + high) / 2
        cuts = _filled(setting, placement, flight, middle)
        if cuts is None:
            low = middle
        else:
            best, high = cuts, middle
    return best


def _filled(setting: Setting, placement: Sequence[int], flight: Integers, longest_s: float) -> Cuts | None:
    """Stages as long as ``longest_s`` and their memory allow, one behind the other."""
    nodes, stages = len(setting.graph.nodes), len(placement)
    chunks = np.bincount(placement)
    cuts = [0]
    for stage, device in enumerate(placement):
        start, sums = cuts[-1], setting.arrays.sums[setting.slowest[device]]
        if start >= nodes:
            return None
        time: Floats = sums[: WEIGHT + 1].sum(axis=0)
        held: Floats = sums[STATE] + flight[stage] * sums[SAVED]
        share = setting.limits[device] / chunks[device]
        end = min(_last(time, start, longest_s), _last(held, start, share), nodes - (stages - stage - 1))
        while end > start and held[end] - held[start] + _workspace(setting, device, start, end) > share:
            end -= 1
        if end <= start:
            return None
        cuts.append(end)
    return tuple(cuts) if cuts[-1] == nodes else None


def _last(prefix: Floats, start: int, most: float) -> int:
    """The last place up to which no more than ``most`` adds up from ``start``."""
    return int(np.searchsorted(prefix, prefix[start] + most * (1 + 1e-12), side="right")) - 1


def _workspace(setting: Setting, device: int, start: int, end: int) -> float:
    level = (end - start).bit_length() - 1
    table = setting.arrays.largest[setting.slowest[device], level]
    return float(max(table[start], table[end - (1 << level)]))
