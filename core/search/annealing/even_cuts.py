"""Even cuts: with stages of equal work, and with devices of equal work, whose own stages may be uneven.

The work of each device is much cheaper to compute than a step of thousands of actions. So cuts are first moved by the
devices' work alone.
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
"""Exponent of the norm of the devices' loads that is minimized: close to the maximum, but smaller loads count too."""
NEXT_CUT = 0.5
"""Probability that a move includes the next cut."""
REACH = 1.5
"""Mean distance of a move in operators."""


def even_cuts(setting: Setting, placement: Sequence[int]) -> Cuts:
    """Cuts whose stages have work in proportion to their devices' speeds; with equal speeds, even within each loop."""
    chunks, extra = divmod(len(placement), setting.devices)
    if len(set(setting.speeds)) == 1 and not extra:
        return looped_cuts(setting.prefix, setting.devices, [1.0] * chunks)
    return tuple(spread(setting.prefix, 0, len(setting.prefix) - 1, [setting.speeds[d] for d in placement]))


def balanced_cuts(setting: Setting, placement: Integers, cuts: Cuts) -> Cuts:
    """Cuts that give the devices about equal work, by descent from ``cuts``."""
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
    """Move cuts and keep each move that does not increase the unevenness.

    Args:
        times: per device, time of the operators before each, (devices, nodes + 1).
        placement: device of every stage.
        cuts: (stages + 1), changed in place.
        moves: number of moves to try.
    """
    np.random.seed(0)
    before, loads = cuts.copy(), np.zeros(times.shape[0])
    value = _unevenness(times, placement, cuts, loads)
    for _ in range(moves):
        before[:] = cuts
        if not shift_cuts(cuts, REACH, NEXT_CUT):
            continue
        new = _unevenness(times, placement, cuts, loads)
        if new <= value:
            value = new
        else:
            cuts[:] = before
