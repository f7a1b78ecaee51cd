"""Whether a plan with at most some step exists for a small graph: by enumeration of placements, and CP-SAT (OR-Tools).

1. Every operator is a stage of its own. That excludes nothing: where messages are pure delays the order of a larger
   stage is also an order of its operators, with the same time and memory or less.
2. All placements of the operators on equal devices are enumerated. Most have a lower bound above the step.
3. The orders of each other placement are a constraint program, smallest bound first. Its limit is deterministic: the
   answer does not depend on the machine's load.

The operators of a case are a chain with further edges: each microbatch runs F of all operators, then I of all in
reverse. So between F and I of an operator a device holds what all its earlier operators saved.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attrs import frozen
from ortools.sat.python import cp_model
from panpipe.core.evaluate.coding import FORWARD, INPUT, WEIGHT

from benchmarks.planning.small_cases import AMPLE, Case

HUGE = 10**9
PROPAGATION = (True, False)
"""Whether CP-SAT uses its strong propagation of disjunctions: each way solves programs that the other does not."""


@frozen
class Answer:
    """Whether some step is possible.

    Args:
        step_s: of a plan that was found; None without one.
        open: number of placements for which there is no answer within the limit; a plan may exist if there are any.
    """

    step_s: int | None
    open: int = 0


def fastest_within(case: Case, horizon: int, effort: float) -> Answer:
    """A plan with a step of at most ``horizon`` seconds, or that there is none.

    Args:
        case: with whole numbers of seconds.
        horizon: the longest step.
        effort: limit of each program, in CP-SAT's deterministic seconds.
    """
    left = 0
    for placed in candidates(case, horizon):
        step_s = OrderProgram(placed, horizon).step(effort)
        if step_s is None:
            left += 1
        elif step_s < HUGE:
            return Answer(step_s)
    return Answer(None, left)


def candidates(case: Case, horizon: int) -> list["Placed"]:
    """The placements whose lower bound is at most ``horizon``, smallest first."""
    placed = (Placed(case, device_of) for device_of in placements(len(case.graph.nodes), len(case.cluster.devices)))
    found = [(each.bound_s, each.device_of, each) for each in placed if each.bound_s <= horizon]
    return [each for *_, each in sorted(found, key=lambda item: item[:2])]


def placements(operators: int, devices: int) -> Iterator[tuple[int, ...]]:
    """All devices of all operators; equal devices are numbered by their first use."""

    def after(first: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(first) == operators:
            yield first
            return
        for device in range(min(max(first) + 2, devices)):
            yield from after((*first, device))

    return after((0,))


class Placed:
    """A case with a device for each operator.

    Args:
        case: the request.
        device_of: of each operator.
    """

    def __init__(self, case: Case, device_of: Sequence[int]) -> None:
        graph = case.graph
        self.case, self.device_of, self.count = case, tuple(device_of), case.microbatches
        self.operators = range(len(graph.nodes))
        self.times = [tuple(map(int, (n.forward_s, n.backward_input_s, n.backward_weight_s))) for n in graph.nodes]
        self.on = [[i for i in self.operators if device_of[i] == d] for d in range(len(case.cluster.devices))]
        self.saved, self.workspace = (
            [int(getattr(n, f"{k}_bytes")) for n in graph.nodes] for k in ("saved", "workspace")
        )
        self.spare = [case.limit - sum(graph.nodes[i].state_bytes for i in own) for own in self.on]
        self.edges: list[tuple[int, int, int, int]] = []
        """Source, reader, delay of the output, delay of the gradient."""
        for edge in graph.edges:
            a, b = graph.index[edge.src], graph.index[edge.dst]
            apart = self.device_of[a] != self.device_of[b]
            delay, back = case.latency_s + edge.bytes, case.latency_s + max(edge.bytes, 1)
            self.edges.append((a, b, apart * delay, apart * back))

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """Earliest start of F and I of each operator."""
        return self._starts(0)

    @cached_property
    def turns(self) -> list[int]:
        """The least time from the start of F of each operator to the end of its I."""
        return [self._starts(i)[0][INPUT] + self.times[i][INPUT] for i in self.operators]

    def _starts(self, first: int) -> list[tuple[int, int]]:
        """Earliest start of F and I of the operators from ``first`` on, if its F starts at 0."""
        forward, back = {first: 0}, dict[int, int]()
        for b in self.operators[first + 1 :]:
            forward[b] = max(
                forward[a] + self.times[a][FORWARD] + out for a, r, out, _ in self.edges if r == b and a >= first
            )
        for a in reversed(self.operators[first:]):
            ends = [back[b] + self.times[b][INPUT] + delay for s, b, _, delay in self.edges if s == a]
            back[a] = max([forward[a] + self.times[a][FORWARD], *ends])
        return [(forward[i], back[i]) for i in self.operators[first:]]

    @cached_property
    def tails(self) -> list[tuple[int, int, int]]:
        """Time from the start of F, I and W of each operator to the end of all that follows."""
        back, forward = dict[int, int](), dict[int, int]()
        for b in self.operators:
            later = [delay + back[a] for a, r, _, delay in self.edges if r == b]
            back[b] = self.times[b][INPUT] + max([self.times[b][WEIGHT], *later])
        for a in reversed(self.operators):
            later = [out + forward[b] for s, b, out, _ in self.edges if s == a]
            forward[a] = self.times[a][FORWARD] + max([back[a], *later])
        return [(forward[i], back[i], self.times[i][WEIGHT]) for i in self.operators]

    def in_flight(self, device: int) -> Iterator[tuple[int, int]]:
        """Each operator of a device, with the most microbatches between the start of its F and the end of its I."""
        held = 0
        for i in self.on[device]:
            held += self.saved[i]
            yield i, min((self.spare[device] - self.workspace[i]) // held if held else HUGE, self.count)

    @property
    def is_short(self) -> bool:
        """Whether memory is a limit."""
        return self.case.limit < AMPLE

    @cached_property
    def bound_s(self) -> int:
        """A lower bound of the step of every order; ``HUGE`` if one microbatch does not fit.

        The largest, over the devices, of
        - head, work and tail: until the first gradient arrives a device runs F alone, after its last I W alone;
        - turns: F of a microbatch waits for I of one before, if memory does not hold both;
        - memory: bytes times seconds that all microbatches hold at least, over the device's bytes.
        """
        bound = max(tail for tail, _, _ in self.tails)
        for d, own in enumerate(self.on):
            if not own:
                continue
            if any(most < 1 for _, most in self.in_flight(d)):
                return HUGE
            first, last = own[0], own[-1]
            alone = dict.fromkeys(own, self.count)
            if self.is_short:
                alone = {i: min(self.count, self.spare[d] // self.saved[i] if self.saved[i] else HUGE) for i in own}
                for i, most in self.in_flight(d):
                    waits = -(-self.count // most) - 1
                    bound = max(bound, self.heads[i][FORWARD] + waits * self.turns[i] + self.tails[i][FORWARD])
                held = self.count * sum(self.saved[i] * (self.turns[i] + self.times[i][WEIGHT]) for i in own)
                bound = max(bound, self.heads[first][FORWARD] + -(-held // self.spare[d]))
            work = self.count * sum(sum(self.times[i]) for i in own)
            arrival = self.heads[last][INPUT]
            before = min(sum(alone[i] * self.times[i][FORWARD] for i in own), arrival - self.heads[first][FORWARD])
            after = sum(alone[i] * self.times[i][WEIGHT] for i in own)
            drain = self.tails[first][INPUT] - self.times[first][INPUT]
            bound = max(bound, arrival + work - before - after + max(drain, after))
        return bound


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
