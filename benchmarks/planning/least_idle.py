"""The shortest step that any order on a placement allows, by CP-SAT (OR-Tools), against what the search finds.

For the cases of ``bench_search`` with two chunks: F, I and W of every stage and microbatch, one at a time on a device,
delays of hops, saved tensors from F to W under the memory limit. Equal microbatches run in their order. CP-SAT begins
with the search's order. A line per placement: the step found by CP-SAT, its lower bound, and the search's step.

    python benchmarks/planning/least_idle.py --devices 4 --microbatches 8 [--seconds 600] [--placements v|all]
        [--workers 8]
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ortools.sat.python import cp_model
from panpipe.core.actions import Kind
from panpipe.core.schedules.scored import Scored
from panpipe.core.search.orders.auto import EVALUATIONS

from benchmarks.planning.bench_search import CASES, search

CHUNKS = 2
UNIT = 2
"""Times are multiples of half a unit, as those of half of a device's work are."""
Starts = dict[tuple[str, int, int], int]


class Program:
    """All orders of a case's actions on a placement."""

    def __init__(self, case: dict[str, Any], memory: float, placement: tuple[int, ...], horizon: float) -> None:
        self.model, self.horizon = cp_model.CpModel(), round(horizon * UNIT)
        self.starts: dict[tuple[str, int, int], cp_model.IntVar] = {}
        costs = case["forward"], case["backward_input"], case["backward_weight"]
        self.times = dict(zip("FIW", (round(cost / CHUNKS * UNIT) for cost in costs), strict=True))
        self.hop, self.count = round(case["comm"] * UNIT), case["microbatches"]
        for kind, stage, m in itertools.product("FIW", range(len(placement)), range(self.count)):
            latest = self.horizon - self.times[kind]
            self.starts[kind, stage, m] = self.model.new_int_var(0, latest, f"{kind}{stage}.{m}")
        self._add_orders(placement)
        for device in range(case["devices"]):
            self._add_device([stage for stage, where in enumerate(placement) if where == device], memory)
        self.step = self.model.new_int_var(0, self.horizon, "step")
        for kind, stage, m in self.starts:
            self.model.add(self.step >= self._end(kind, stage, m))
        self.model.minimize(self.step)

    def _end(self, kind: str, stage: int, m: int) -> cp_model.LinearExpr:
        return self.starts[kind, stage, m] + self.times[kind]

    def _add_orders(self, placement: tuple[int, ...]) -> None:
        for (kind, stage, m), start in self.starts.items():
            if kind != "F":
                self.model.add(start >= self._end("F" if kind == "I" else "I", stage, m))
            if m:
                self.model.add(start >= self._end(kind, stage, m - 1))
            if stage and kind != "W":
                delay = self.hop if placement[stage] != placement[stage - 1] else 0
                first, second = (stage - 1, stage) if kind == "F" else (stage, stage - 1)
                self.model.add(self.starts[kind, second, m] >= self._end(kind, first, m) + delay)

    def _add_device(self, stages: list[int], memory: float) -> None:
        own = [action for action in self.starts if action[1] in stages]
        self.model.add_no_overlap(
            self.model.new_fixed_size_interval_var(self.starts[action], self.times[action[0]], "") for action in own
        )
        saved = []
        for stage, m in itertools.product(stages, range(self.count)):
            length = self.model.new_int_var(0, self.horizon, "")
            saved.append(self.model.new_interval_var(self.starts["F", stage, m], length, self._end("W", stage, m), ""))
        self.model.add_cumulative(saved, [1] * len(saved), int(memory * CHUNKS + 1e-3))

    def solve(self, seconds: float, workers: int, hint: Starts) -> tuple[str, float, float]:
        """The status, the shortest step found and the lower bound."""
        for action, start in hint.items():
            self.model.add_hint(self.starts[action], start)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, workers
        status = solver.status_name(solver.solve(self.model))
        found = solver.objective_value / UNIT if status in ("OPTIMAL", "FEASIBLE") else float("inf")
        return status, found, solver.best_objective_bound / UNIT


def starts_of(found: Scored, case: dict[str, Any]) -> Starts:
    """The starts of the search's order; a B is an I and a W."""
    starts: Starts = {}
    late = round(case["backward_input"] / CHUNKS * UNIT)
    for actions, times in zip(found.schedule.device_actions, found.result.starts, strict=True):
        for action, time in zip(actions, times, strict=True):
            if action.kind is Kind.B:
                starts["W", action.stage, action.microbatch] = round(time * UNIT) + late
            kind = "I" if action.kind is Kind.B else action.kind.value
            starts[kind, action.stage, action.microbatch] = round(time * UNIT)
    return starts


def placements(devices: int) -> Iterator[tuple[int, ...]]:
    """Every placement with two stages on each device; devices, which are equal, are in order of their first stages."""

    def extended(start: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(start) == CHUNKS * devices:
            yield start
            return
        for device in range(min(devices, len(set(start)) + 1)):
            if start.count(device) < CHUNKS:
                yield from extended((*start, device))

    return extended(())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward", type=float, default=10, help="the case with this time of F")
    parser.add_argument("--seconds", type=float, default=600, help="for each placement")
    parser.add_argument("--placements", choices=("v", "all"), default="v")
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    wanted = arguments.devices, arguments.microbatches, arguments.forward
    cases = json.loads(CASES.read_text(encoding="utf-8"))["frontiers"]
    case = next((c for c in cases if (c["devices"], c["microbatches"], c["forward"]) == wanted), None)
    if case is None:
        parser.error(f"no public case has {wanted[0]} devices, {wanted[1]} microbatches and an F of {wanted[2]:g}")
    public = case["frontier"][0]
    found = search(case, public["memory"], EVALUATIONS, 0)
    work = case["microbatches"] * sum(case[name] for name in ("forward", "backward_input", "backward_weight"))

    def cut(step: float) -> str:
        return f"{step:g} (idle time {(step - work) / (public['makespan'] - work) - 1:+.1%})"

    print(f"search: {cut(found.result.makespan)} · public best {public['makespan']:g}", flush=True)
    v = (*range(arguments.devices), *reversed(range(arguments.devices)))
    for placement in placements(arguments.devices) if arguments.placements == "all" else [v]:
        same = found.schedule.placement == placement
        # Another placement is of interest if it is faster.
        program = Program(
            case, public["memory"], placement, found.result.makespan if same else found.result.makespan - 1
        )
        hint = starts_of(found, case) if same else {}
        status, step, bound = program.solve(arguments.seconds, arguments.workers, hint)
        shown = "none is faster" if status == "INFEASIBLE" else f"{status.lower()} {cut(step)}, at least {cut(bound)}"
        print("".join(map(str, placement)), shown, flush=True)


if __name__ == "__main__":
    main()
