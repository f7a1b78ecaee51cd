"""Several stages a device: a device's load is the sum over its stages, which no split point decides alone.

First dynamic programming towards equal stages, then coordinate descent: each cut in turn moves to where it does the
most good, until none does.
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from attrs import define

from .exact import fewest
from .problem import Cuts, PartitionProblem
from .ranges import Table

Values = npt.NDArray[np.float64]
SWEEPS = 200
"""Far above what is ever needed: descent stops when no cut moves."""


def balanced(problem: PartitionProblem) -> Cuts:
    """Cuts for any number of stages a device; they may exceed a memory limit where no descent found better.

    Stages are first made as equal as they can be, then cuts move to even out stages and devices together, and last
    to shorten the slowest device alone. Memory above a limit weighs more than any time.
    """
    descent = _Descent.of(problem)
    for aim in (_even, _slowest):
        for _ in range(SWEEPS):
            if not sum(descent.move(cut, aim) for cut in range(1, problem.stages)):
                break
    return tuple(descent.cuts)


def equal_stages(problem: PartitionProblem) -> Cuts:
    """Cuts with the least sum of squared distances of each stage's compute from the mean."""
    compute = problem.tables.compute_s
    distances = (compute - compute[-1, 0] / problem.stages) ** 2
    return fewest(problem.stages, problem.tables.size, lambda _: distances)[0]


Aim = Callable[[Values, Values, Values], tuple[Values, ...]]
"""What to make small, first things first, from the bytes above the limits, each device's load (columns) and the sum of
the stages' squared times; one row for each place where a cut could go."""


def _even(excess: Values, loads: Values, squares: Values) -> tuple[Values, ...]:
    return excess, squares + (loads**2).sum(axis=1)


def _slowest(excess: Values, loads: Values, _: Values) -> tuple[Values, ...]:
    return excess, loads.max(axis=1), (loads**2).sum(axis=1)


@define
class _Descent:
    """Cuts on their way down.

    Args:
        problem: what is asked.
        stages_on: stages of each device.
        cuts: so far.
        times: time table of each stage; stages with the same link share one.
        loads, excess: seconds, and bytes above the limit, of each device under ``cuts``.
    """

    problem: PartitionProblem
    stages_on: list[list[int]]
    cuts: list[int]
    times: list[Table]
    loads: Values
    excess: Values

    @classmethod
    def of(cls, problem: PartitionProblem) -> "_Descent":
        stages_on = [problem.stages_on(device) for device in range(problem.devices)]
        zeros = np.zeros(problem.devices)
        descent = cls(problem, stages_on, list(equal_stages(problem)), problem.time_tables(), zeros, zeros.copy())
        descent._refresh(range(problem.devices))
        return descent

    def move(self, cut: int, aim: Aim) -> bool:
        """Move one cut to its best place between its neighbours; False where it stands there already."""
        places = np.arange(self.cuts[cut - 1] + 1, self.cuts[cut + 1])
        choice = np.arange(len(places))
        for values in aim(*self._outcome(cut, places)):
            least = values[choice].min()
            choice = choice[values[choice] <= least + 1e-9 * abs(least)]
        if self.cuts[cut] in places[choice]:
            return False
        self.cuts[cut] = int(places[choice[0]])
        self._refresh({self.problem.placement[cut - 1], self.problem.placement[cut]})
        return True

    def _outcome(self, cut: int, places: npt.NDArray[np.intp]) -> tuple[Values, Values, Values]:
        problem = self.problem
        loads = np.tile(self.loads, (len(places), 1))
        excess = np.tile(self.excess, (len(places), 1))
        squares = np.zeros(len(places))  # of the two stages that change: the others add the same everywhere
        for device in {problem.placement[cut - 1], problem.placement[cut]}:
            load, over, square = self._device(device, cut, places)
            loads[:, device], excess[:, device] = load, over
            squares += square
        return excess.sum(axis=1), loads, squares

    def _device(self, device: int, cut: int, places: npt.NDArray[np.intp]) -> tuple[Values, Values, Values]:
        """Load, bytes above the limit and squared stage times of one device, were ``cut`` at each of ``places``."""
        problem, tables = self.problem, self.problem.tables
        load, steady, workspace, squares = np.zeros((4, len(places)))
        for stage in self.stages_on[device]:
            end = places if stage == cut - 1 else self.cuts[stage + 1]
            start = places if stage == cut else self.cuts[stage]
            time = self.times[stage][end, start]
            load += time
            squares += time**2
            steady += tables.state_bytes[end, start] + problem.in_flight[stage] * tables.saved_bytes[end, start]
            workspace = np.maximum(workspace, tables.workspace_bytes[end, start])
        return load, np.maximum(steady + workspace - problem.limits[device], 0), squares

    def _refresh(self, devices: Iterable[int]) -> None:
        for device in devices:
            load, over, _ = self._device(device, 0, np.zeros(1, dtype=np.intp))
            self.loads[device], self.excess[device] = load[0], over[0]
