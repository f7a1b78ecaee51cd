"""Even cuts: of even stages, and of even devices; those of a device that holds several stages may be uneven.

Loads of devices are cheap to tell, and a step of thousands of actions is not: the moves that a search can afford are
made on loads first.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...costs.partition import Cuts
from ...evaluate.coding import WEIGHT, Integers
from ...numba_cache import njit
from ..problem.looped_cuts import looped_cuts, spread
from ..problem.setting import Setting
from .moves import shift_cuts

MOVES = 20_000
"""Moves of cuts: some milliseconds for a hundred stages."""
POWER = 16
"""Of the sum of powers of loads that is made small: near the largest, and still told apart by the others."""
AGAIN = 0.5
"""How likely a move takes the next cut along."""
REACH = 1.5
"""Mean reach of a move in operators."""


def even_cuts(setting: Setting, placement: Sequence[int]) -> Cuts:
    """Stages of as much work as their devices are fast: even within each loop where these are all the same."""
    chunks, extra = divmod(len(placement), setting.devices)
    if len(set(setting.speeds)) == 1 and not extra:
        return looped_cuts(setting.prefix, setting.devices, [1.0] * chunks)
    return tuple(spread(setting.prefix, 0, len(setting.prefix) - 1, [setting.speeds[d] for d in placement]))


def balanced_cuts(setting: Setting, placement: Integers, cuts: Cuts) -> Cuts:
    """Cuts with which the devices have about as much work as each other: found downhill from ``cuts``."""
    times = setting.arrays.sums[list(setting.slowest), : WEIGHT + 1].sum(axis=1)
    result = np.array(cuts, dtype=np.int64)
    if len(placement) > 1 and times[:, -1].max() > 0:
        _descend(np.ascontiguousarray(times), placement, result, MOVES)
    return tuple(result.tolist())


@njit()
def _unevenness(times: Any, placement: Any, cuts: Any, loads: Any) -> float:
    loads[:] = 0.0
    for s in range(placement.shape[0]):
        d = placement[s]
        loads[d] += times[d, cuts[s + 1]] - times[d, cuts[s]]
    most = loads.max()
    return float(most * ((loads / most) ** POWER).sum() ** (1 / POWER)) if most > 0 else 0.0


@njit()
def _descend(times: Any, placement: Any, cuts: Any, moves: int) -> None:
    """Move cuts downhill.

    Args:
        times: per device, time of the operators before each, (devices, nodes + 1).
        placement: device of every stage.
        cuts: (stages + 1), changed.
        moves: how many are tried.
    """
    np.random.seed(0)
    before, loads = cuts.copy(), np.zeros(times.shape[0])
    value = _unevenness(times, placement, cuts, loads)
    for _ in range(moves):
        before[:] = cuts
        if not shift_cuts(cuts, REACH, AGAIN):
            continue
        new = _unevenness(times, placement, cuts, loads)
        if new <= value:
            value = new
        else:
            cuts[:] = before
