"""Exact solution of small cases: the fastest order of a placement as a mixed-integer program, solved by HiGHS.

Each action has a start time; for every two actions of a device that could run in either order, a binary variable is 1
if the first runs first. Start times respect dependencies, the order (with a large constant, M), and the order of a
stage's microbatches, which excludes no faster order because microbatches are equal. The bytes that a device holds at
the start of an action follow from the actions before it, so the memory limit is linear, too. The formulation is that of
OptPipe (arXiv 2510.05186, section 4), without offload.
"""

from collections.abc import Iterator
from itertools import combinations, islice, product

import numpy as np
from attrs import define, field, frozen
from scipy import optimize, sparse

from ...actions import Action, Kind
from ...evaluate.coding import FORWARD, INPUT, WEIGHT
from ...schedules.construction.instance import Instance

LARGEST = 400
"""Most binary variables of a program: two devices with one stage each and 12 microbatches have 396."""
NODES = 2_000
"""Branch-and-bound nodes: a limit on the work instead of the time, so that the same input gives the same answer."""

_Op = tuple[int, int, int]
"""Kind, stage, microbatch."""


@frozen
class Exact:
    """The result of the exact program.

    Args:
        bound: a lower bound on the makespan of this placement, up to the solver's relative gap of 1e-6.
        device_actions: the best order found, or None if none is faster than the known one.
    """

    bound: float
    device_actions: tuple[tuple[Action, ...], ...] | None


def solvable(task: Instance) -> bool:
    """Whether a problem is small enough for the program, which has no B.

    B must be no better than I and W: not faster, and, with a memory limit, no smaller because I leaves more than F
    saved.
    """
    if np.any(task.backward < (task.times[INPUT] + task.times[WEIGHT]) * (1 - 1e-12)):
        return False
    if np.any(task.kept > task.saved) and np.any(np.isfinite(task.limits)):
        return False
    return sum(1 for _ in islice(_open_pairs(task), LARGEST + 1)) <= LARGEST


def solve(task: Instance, makespan: float, nodes: int = NODES) -> Exact:
    """The fastest order, or a bound on it if the node limit is reached.

    Args:
        task: a problem that is ``solvable``.
        makespan: of a known order; slower orders are excluded.
        nodes: limit on the number of branch-and-bound nodes.
    """
    return _Program(task, makespan).solve(nodes)


def _actions(task: Instance) -> Iterator[_Op]:
    return product((FORWARD, INPUT, WEIGHT), range(len(task.placement)), range(task.problem.microbatches))


def _follows(one: _Op, other: _Op) -> bool:
    """Whether ``other`` runs after ``one`` in every order: by dependencies, and by the order of microbatches."""
    (kind, stage, m), (later, there, n) = one, other
    if m > n:
        return False
    if kind == later and (stage == there or kind == WEIGHT):
        return stage == there and m < n
    if kind == FORWARD:
        return later != FORWARD or stage < there
    return kind == INPUT and (there <= stage if later == INPUT else later == WEIGHT and there == stage)


def _open_pairs(task: Instance) -> Iterator[tuple[_Op, _Op]]:
    """Actions of one device that could run in either order."""
    for own in task.stages_on.tolist():
        for one, other in combinations([action for action in _actions(task) if action[1] in own], 2):
            if not _follows(one, other) and not _follows(other, one):
                yield one, other


@define
class _Program:
    """The program of one placement.

    Args:
        task: the problem.
        horizon: an upper bound on the makespan.
        columns: action → column of its start time; column 0 is the makespan.
        pairs: (action, action) → column of the binary variable that is 1 if the first runs first.
    """

    task: Instance
    horizon: float
    columns: dict[_Op, int] = field(factory=dict)
    pairs: dict[tuple[_Op, _Op], int] = field(factory=dict)
    _rows: list[tuple[dict[int, float], float]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        for action in _actions(self.task):
            self.columns[action] = 1 + len(self.columns)
        for one, other in _open_pairs(self.task):
            self.pairs[one, other] = 1 + len(self.columns) + len(self.pairs)

    def solve(self, nodes: int) -> Exact:
        """Build the program and solve it with HiGHS."""
        self._add_dependencies()
        self._add_device_orders()
        self._add_memory_limits()
        width = 1 + len(self.columns) + len(self.pairs)
        matrix = sparse.lil_array((len(self._rows), width))
        for number, (row, _) in enumerate(self._rows):
            for column, factor in row.items():
                matrix[number, column] = factor
        upper = np.array([limit for _, limit in self._rows])
        goal, whole, top = np.zeros(width), np.zeros(width), np.full(width, self.horizon)
        goal[0] = 1
        whole[1 + len(self.columns) :] = 1
        top[1 + len(self.columns) :] = 1
        found = optimize.milp(
            goal, integrality=whole, bounds=optimize.Bounds(0, top),
            constraints=optimize.LinearConstraint(matrix.tocsr(), -np.inf, upper),
            options={"node_limit": nodes, "mip_rel_gap": 1e-6},
        )  # fmt: skip
        if found.status == 2:  # infeasible: no order is as fast as the known one
            return Exact(self.horizon, None)
        bound = float(found.fun) if found.status == 0 else max(float(found.mip_dual_bound or 0.0), 0.0)
        if found.x is None:
            return Exact(bound, None)
        starts = {action: float(found.x[column]) for action, column in self.columns.items()}
        return Exact(bound, tuple(self._order(own, starts) for own in self.task.stages_on.tolist()))

    def _order(self, own: list[int], starts: dict[_Op, float]) -> tuple[Action, ...]:
        """The order of a device; actions with equal starts are in the order of their dependencies."""
        here = [action for action in self.columns if action[1] in own]
        here.sort(key=lambda a: (round(starts[a], 9), a[0], a[1] if a[0] == FORWARD else -a[1], a[2]))
        return tuple(Action(stage, (Kind.F, Kind.I, Kind.W)[kind], m) for kind, stage, m in here)

    def _time(self, action: _Op) -> float:
        return float(self.task.times[action[0], action[1]])

    def _after(self, action: _Op, source: _Op, delay: float = 0.0) -> None:
        """``action`` starts at least ``delay`` after the end of ``source``."""
        row = {self.columns[source]: 1.0, self.columns[action]: -1.0}
        self._rows.append((row, -self._time(source) - delay))

    def _add_dependencies(self) -> None:
        hops, last = self.task.hops, len(self.task.placement) - 1
        for kind, stage, m in self.columns:
            action = kind, stage, m
            self._rows.append(({self.columns[action]: 1.0, 0: -1.0}, -self._time(action)))
            if m > 0:
                self._after(action, (kind, stage, m - 1))
            if kind == FORWARD and stage > 0:
                self._after(action, (FORWARD, stage - 1, m), float(hops[stage]))
            elif kind == INPUT:
                self._after(action, (FORWARD, stage, m))
                if stage < last:
                    self._after(action, (INPUT, stage + 1, m), float(hops[stage + 1]))
            elif kind == WEIGHT:
                self._after(action, (INPUT, stage, m))

    def _add_device_orders(self) -> None:
        """A device runs one action at a time."""
        for (one, other), pair in self.pairs.items():
            a, b, far = self.columns[one], self.columns[other], self.horizon
            self._rows.append(({a: 1.0, b: -1.0, pair: far}, far - self._time(one)))
            self._rows.append(({b: 1.0, a: -1.0, pair: -far}, -self._time(other)))

    def _add_memory_limits(self) -> None:
        """The bytes that a device holds at the start of a forward: from all actions before it, and its own."""
        task = self.task
        change = task.for_orders()[2].saved.sum(axis=0)
        for device, own in enumerate(task.stages_on.tolist()):
            limit = float(task.limits[device])
            if not np.isfinite(limit):
                continue
            here = [action for action in self.columns if action[1] in own]
            for action in here:
                if action[0] != FORWARD:
                    continue
                row, held = dict[int, float](), float(task.saved[action[1]])
                for other in here:
                    size = float(change[other[0]][other[1]])
                    if other == action or size == 0 or _follows(action, other):
                        continue
                    if _follows(other, action):
                        held += size
                    elif (other, action) in self.pairs:
                        row[self.pairs[other, action]] = size
                    else:
                        held += size
                        row[self.pairs[action, other]] = -size
                self._rows.append((row, limit - held))
