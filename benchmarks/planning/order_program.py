"""All orders of a placement as a constraint program for CP-SAT (OR-Tools): a check of `order_search`, and slower."""

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ortools.sat.python import cp_model
from panpipe.core.evaluate.coding import FORWARD, INPUT, WEIGHT

from benchmarks.planning.placed import HUGE, Placed

PROPAGATION = (True, False)
"""Whether CP-SAT uses its strong propagation of disjunctions: each way solves programs that the other does not."""


class OrderProgram:
    """All orders of a placement with a step of at most ``horizon`` seconds."""

    def __init__(self, placed: Placed, horizon: int) -> None:
        self.model = cp_model.CpModel()
        self._placed, self._horizon, self._possible = placed, horizon, True
        self._starts: dict[tuple[int, int, int], cp_model.IntVar] = {}
        self._add_starts()
        if self._possible:
            self._add_order_of_microbatches()
            self._add_edges()
            for device in range(len(placed.on)):
                self._add_device(device)

    def _add_starts(self) -> None:
        placed = self._placed
        for i in placed.operators:
            heads = (*placed.heads[i], placed.heads[i][INPUT] + placed.times[i][INPUT])
            for kind in (FORWARD, INPUT, WEIGHT):
                for m in range(placed.count):
                    low = heads[kind] + m * placed.times[i][kind]
                    high = self._horizon - placed.tails[i][kind] - (placed.count - 1 - m) * placed.times[i][kind]
                    self._possible &= low <= high
                    self._starts[i, kind, m] = self.model.new_int_var(low, max(low, high), "")

    def _end(self, i: int, kind: int, m: int) -> cp_model.LinearExpr:
        return self._starts[i, kind, m] + self._placed.times[i][kind]

    def _add_order_of_microbatches(self) -> None:
        """An operator runs F, I and W in this order, and microbatches in theirs, which are equal."""
        for (i, kind, m), start in self._starts.items():
            if kind:
                self.model.add(start >= self._end(i, kind - 1, m))
            if m:
                self.model.add(start >= self._end(i, kind, m - 1))

    def _add_edges(self) -> None:
        for a, b, delay, back in self._placed.edges:
            for m in range(self._placed.count):
                self.model.add(self._starts[b, FORWARD, m] >= self._end(a, FORWARD, m) + delay)
                self.model.add(self._starts[a, INPUT, m] >= self._end(b, INPUT, m) + back)

    def _add_device(self, device: int) -> None:
        placed, running, held = self._placed, [], []
        for i in placed.on[device]:
            least = placed.turns[i] + placed.times[i][WEIGHT]
            for m in range(placed.count):
                for kind in (FORWARD, INPUT, WEIGHT):
                    own = self.model.new_fixed_size_interval_var(self._starts[i, kind, m], placed.times[i][kind], "")
                    running.append(own)
                    held.append((own, placed.workspace[i]))
                length = self.model.new_int_var(least, self._horizon, "")
                saved = self.model.new_interval_var(self._starts[i, FORWARD, m], length, self._end(i, WEIGHT, m), "")
                held.append((saved, placed.saved[i]))
        self.model.add_no_overlap(running)
        if placed.is_short:
            intervals, sizes = zip(*((each, size) for each, size in held if size), strict=True)
            self.model.add_cumulative(intervals, sizes, placed.spare[device])
            for i, most in placed.in_flight(device):  # follows from the cumulative constraint, which does not find it
                for m in range(placed.count - most):
                    self.model.add(self._starts[i, FORWARD, m + most] >= self._end(i, INPUT, m))

    def step(self, effort: float) -> int | None:
        """The step of an order; ``HUGE`` if there is none, None without an answer."""
        if not self._possible:
            return HUGE
        for strong in PROPAGATION:
            solver = cp_model.CpSolver()
            parameters = solver.parameters
            parameters.num_workers, parameters.linearization_level = 1, 0
            parameters.max_deterministic_time = effort / len(PROPAGATION)
            parameters.use_strong_propagation_in_disjunctive = strong
            parameters.use_dynamic_precedence_in_disjunctive = strong
            status = solver.status_name(solver.solve(self.model))
            if status == "INFEASIBLE":
                return HUGE
            if status in ("OPTIMAL", "FEASIBLE"):
                starts = {action: solver.value(start) for action, start in self._starts.items()}
                return self._step_of(starts) if self._fits(starts) else None
        return None

    def shortest(self, seconds: float, workers: int, known: Mapping[tuple[int, int, int], int]) -> tuple[int, int]:
        """The shortest step that is found, and a lower bound of all.

        Args:
            seconds: for the search.
            workers: of CP-SAT, which search in different ways.
            known: (operator, kind, microbatch) → its start in an order within the horizon.
        """
        for action, start in known.items():
            self.model.add_hint(self._starts[action], start)
        step = self.model.new_int_var(0, self._horizon, "")
        for i in self._placed.operators:
            self.model.add(step >= self._end(i, WEIGHT, self._placed.count - 1))
        self.model.minimize(step)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, workers
        found = solver.status_name(solver.solve(self.model)) in ("OPTIMAL", "FEASIBLE")
        return round(solver.objective_value) if found else HUGE, round(solver.best_objective_bound)

    def _step_of(self, starts: dict[tuple[int, int, int], int]) -> int:
        return max(start + self._placed.times[i][kind] for (i, kind, _), start in starts.items())

    def _fits(self, starts: dict[tuple[int, int, int], int]) -> bool:
        """Whether the memory suffices for actions that take no time, too, which CP-SAT leaves out."""
        placed = self._placed
        for own, spare in zip(placed.on, placed.spare, strict=True):
            held = 0
            here = [action for action in starts if action[0] in own]
            for i, kind, _ in sorted(here, key=lambda a: (starts[a], placed.times[a[0]][a[1]], a[1], a[2])):
                held += placed.saved[i] * (kind == FORWARD)
                if held + placed.workspace[i] > spare:
                    return False
                held -= placed.saved[i] * (kind == WEIGHT)
        return True
