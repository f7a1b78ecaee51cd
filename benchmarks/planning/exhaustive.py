"""The search for plans against the exact optimum, on graphs of up to nine operators.

Two hundred random graphs from a seed, on two or three devices with four to six microbatches; half of them with memory
that is short. The optimum is over all devices of all operators and all compute orders: a constraint program for CP-SAT
(OR-Tools), in which every operator is a stage of its own. That excludes nothing: where messages are pure delays the
order of a larger stage is also an order of its operators, with the same time and memory or less.

For each graph CP-SAT looks for a plan that is faster than the search's by more than 0.5 %, and where the search finds
nothing that fits, for any plan. Without an answer within ``--seconds`` a graph counts as open.

    python benchmarks/planning/exhaustive.py [--cases 0,50] [--seconds 20] [--record FILE]
"""

import argparse
import itertools
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attrs import frozen
from ortools.sat.python import cp_model
from panpipe.answers.output import print_table
from panpipe.core.cluster.cluster import Cluster, fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.errors import InfeasibleError
from panpipe.core.plan.plan import Plan
from panpipe.core.schedules.registry import resident_families
from panpipe.core.search.choose import plan
from panpipe.core.search.search_options import SearchOptions

from benchmarks.recording import machine, record

CASES = 200
NEAR = 0.005
RATE = 1.0
"""Bytes per second: with whole numbers of bytes all times are whole numbers of seconds."""
HEADER = ("case", "search", "schedule", "faster by", "answer", "search s", "exact s")


@frozen
class Case:
    """A request.

    Args:
        name: for people.
        graph, cluster, microbatches: of the request; all times are whole numbers.
        latency_s: of every link.
        limit: bytes of each device.
    """

    name: str
    graph: OpGraph
    cluster: Cluster
    microbatches: int
    latency_s: int
    limit: int


def case_of(number: int) -> Case:
    """The case of a number: the same everywhere."""
    draw = random.Random(number)
    operators, devices, count = draw.randint(4, 9), draw.choice((2, 3)), draw.randint(4, 6)
    operators = max(operators, devices + 1)
    longest = draw.choice((10, 30, 60))
    tight = number % 2 == 1
    nodes = tuple(
        OpNode(
            f"n{i}", draw.randint(1, longest), draw.randint(1, longest), draw.randint(0, longest), 0.0, 0,
            state_bytes=draw.randint(0, 60), saved_bytes=draw.randint(1, 30), workspace_bytes=draw.randint(0, 15),
        )
        for i in range(operators)
    )  # fmt: skip
    edges = [OpEdge(f"n{i}", f"n{i + 1}", draw.randint(0, longest // 3)) for i in range(operators - 1)]
    pairs = [(a, b) for a, b in itertools.combinations(range(operators), 2) if b > a + 1]
    edges += [
        OpEdge(f"n{a}", f"n{b}", draw.randint(0, longest // 3))
        for a, b in draw.sample(pairs, min(draw.randint(0, 2), len(pairs)))
    ]
    graph, latency_s = OpGraph(nodes, tuple(edges)), draw.randint(0, 3)
    limit = 10**6
    if tight:
        least = least_limit(graph, devices)
        limit = int(least * draw.choice((1.0, 1.05, 1.2, 1.5)))
    name = f"{number}: {operators} operators, {devices} devices, {count} mb{', short' if tight else ''}"
    return Case(name, graph, fully_connected(devices, limit, RATE, float(latency_s)), count, latency_s, limit)


def least_limit(graph: OpGraph, devices: int) -> int:
    """The smallest memory of a device with which one microbatch after another fits, over all devices of operators."""
    best = sys.maxsize
    for chosen in itertools.product(range(devices), repeat=len(graph.nodes) - 1):
        needs = [0] * devices
        for device in range(devices):
            own = [node for node, d in zip(graph.nodes, (0, *chosen), strict=True) if d == device]
            saved, peak = 0, 0
            for node in own:
                saved += node.saved_bytes
                peak = max(peak, saved + node.workspace_bytes)
            needs[device] = sum(node.state_bytes for node in own) + peak
        best = min(best, max(needs))
    return best


class Program:
    """All plans of a case with a step of at most ``horizon`` seconds."""

    def __init__(self, case: Case, horizon: int) -> None:
        self.model = cp_model.CpModel()
        self._case, self._horizon = case, horizon
        graph, devices = case.graph, range(len(case.cluster.devices))
        self._on = [[self.model.new_bool_var("") for _ in devices] for _ in graph.nodes]
        for place in self._on:
            self.model.add_exactly_one(place)
        for i, device in itertools.product(range(len(graph.nodes)), devices):  # equal devices in order of their use
            if device > i:
                self.model.add(self._on[i][device] == 0)
            elif device:
                self.model.add_bool_or([self._on[j][device - 1] for j in range(i)]).only_enforce_if(self._on[i][device])
        self._starts: dict[tuple[int, int, int], cp_model.IntVar] = {}
        self._intervals: list[list[cp_model.IntervalVar]] = [[] for _ in devices]
        self._held: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in devices]
        for operator in range(len(graph.nodes)):
            self._add_operator(operator)
        self._add_edges()
        self._add_devices()

    def _times(self, operator: int) -> tuple[int, int, int]:
        node = self._case.graph.nodes[operator]
        return int(node.forward_s), int(node.backward_input_s), int(node.backward_weight_s)

    def _add_operator(self, operator: int) -> None:
        model, node, times = self.model, self._case.graph.nodes[operator], self._times(operator)
        count = self._case.microbatches
        for m in range(count):
            starts = [model.new_int_var(0, self._horizon - time, "") for time in times]
            for kind, start in enumerate(starts):
                self._starts[operator, kind, m] = start
                if kind:
                    model.add(start >= starts[kind - 1] + times[kind - 1])
                if m:
                    model.add(start >= self._starts[operator, kind, m - 1] + times[kind])
            length = model.new_int_var(0, self._horizon, "")
            model.add(length == starts[2] + times[2] - starts[0])
            for device, present in enumerate(self._on[operator]):
                for start, length_s in zip(starts, times, strict=True):
                    own = model.new_optional_fixed_size_interval_var(start, length_s, present, "")
                    self._intervals[device].append(own)
                    self._held[device].append((own, node.workspace_bytes))
                whole = model.new_optional_interval_var(starts[0], length, starts[2] + times[2], present, "")
                self._held[device].append((whole, node.saved_bytes))

    def _add_edges(self) -> None:
        graph, model = self._case.graph, self.model
        for edge in graph.edges:
            a, b = graph.index[edge.src], graph.index[edge.dst]
            apart = model.new_bool_var("")
            for one, other in zip(self._on[a], self._on[b], strict=True):
                model.add(one == other).only_enforce_if(apart.negated())
                model.add_bool_or(one.negated(), other.negated(), apart.negated())
            delay = (self._case.latency_s + edge.bytes) * apart
            back = (self._case.latency_s + max(edge.bytes, 1)) * apart if edge.gradient else 0
            for m in range(self._case.microbatches):
                model.add(self._starts[b, 0, m] >= self._starts[a, 0, m] + self._times(a)[0] + delay)
                if edge.gradient:
                    model.add(self._starts[a, 1, m] >= self._starts[b, 1, m] + self._times(b)[1] + back)

    def _add_devices(self) -> None:
        nodes, limit = self._case.graph.nodes, self._case.limit
        for device, intervals in enumerate(self._intervals):
            self.model.add_no_overlap(intervals)
            work = [self._case.microbatches * sum(self._times(i)) * self._on[i][device] for i in range(len(nodes))]
            self.model.add(sum(work) <= self._horizon)
            state = sum(node.state_bytes * self._on[i][device] for i, node in enumerate(nodes))
            if limit < 10**6:
                spare = self.model.new_int_var(0, limit, "")
                self.model.add(spare == limit - state)
                kept = [(interval, size) for interval, size in self._held[device] if size]
                self.model.add_cumulative([each for each, _ in kept], [size for _, size in kept], spare)

    def step(self, seconds: float, *, shortest: bool) -> tuple[str, float | None]:
        """CP-SAT's answer (``OPTIMAL``, ``FEASIBLE``, ``INFEASIBLE``, ``UNKNOWN``), and the step of its plan.

        Args:
            seconds: limit.
            shortest: look for the shortest step; otherwise for any.
        """
        end = self.model.new_int_var(0, self._horizon, "")
        for (operator, _, m), start in self._starts.items():
            if m == self._case.microbatches - 1:
                self.model.add(end >= start + self._times(operator)[2])
        if shortest:
            self.model.minimize(end)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 2
        status = solver.status_name(solver.solve(self.model))
        return status, float(solver.value(end)) if status in ("OPTIMAL", "FEASIBLE") else None


def searched(case: Case) -> Plan | None:
    """The search's plan; None if it finds nothing that fits."""
    try:
        return plan(case.graph, case.cluster, case.microbatches, SearchOptions(families=resident_families()))
    except InfeasibleError:
        return None


def compared(case: Case, seconds: float) -> tuple[list[str], str]:
    """A row of the table, and its answer: near, slower, missed or open."""
    began = time.process_time()
    found = searched(case)
    middle = time.process_time()
    if found is None:
        nodes = case.graph.nodes
        longest = sum(n.forward_s + n.backward_input_s + n.backward_weight_s for n in nodes)
        horizon = int(case.microbatches * (longest + 2 * sum(e.bytes + case.latency_s + 1 for e in case.graph.edges)))
        status, best = Program(case, horizon).step(seconds, shortest=False)
        answer = {"INFEASIBLE": "near", "UNKNOWN": "open"}.get(status, "missed")
        step, schedule = "nothing fits", ""
    else:
        step_s = found.predicted.step_s
        limit = int(step_s / (1 + NEAR) - 1e-6)
        status, best = Program(case, limit).step(seconds, shortest=True)
        answer = {"INFEASIBLE": "near", "UNKNOWN": "open"}.get(status, "slower")
        step, schedule = f"{step_s:g}", found.schedule
    faster = "" if best is None or found is None else f"{found.predicted.step_s / best - 1:.2%}"
    spent = time.process_time() - middle
    return [case.name, step, schedule, faster, answer, f"{middle - began:.1f}", f"{spent:.1f}"], answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="first and one past the last, such as 0,50")
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of CP-SAT for a graph")
    parser.add_argument("--record", help="file to which the table is appended")
    given = parser.parse_args()
    first, last = map(int, given.cases.split(",")) if given.cases else (0, CASES)
    rows, answers = [], []
    for number in range(first, last):
        row, answer = compared(case_of(number), given.seconds)
        rows.append(row)
        answers.append(answer)
        print(" | ".join(row), flush=True)
    kinds = ("near", "slower", "missed", "open")
    summary = f"{len(answers)} graphs: " + ", ".join(f"{answers.count(kind)} {kind}" for kind in kinds)
    print_table(summary, HEADER, rows)
    if given.record:
        record(given.record, summary, machine(), HEADER, rows)
    return int(answers.count("near") + answers.count("open") < 0.95 * len(answers) or "missed" in answers)


if __name__ == "__main__":
    sys.exit(main())
