"""The compiled evaluation of an order gives exactly what the readable reference gives, for any order of any stages."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import Action, Kind
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.errors import RequestError
from panpipe.core.plan.memory import held_bytes, order_changes
from panpipe.core.search.problem.arrays import MachineArrays
from panpipe.core.search.problem.costing import fill_fixed
from panpipe.core.timing.coding import CODE, INFINITY, KINDS, encode
from panpipe.core.timing.compiled import count_whole, make_scratch, make_stage_arrays, peak, run, work_of
from panpipe.core.timing.contended import no_links
from panpipe.core.timing.orders import evaluate


class Case:
    """Random stages on random devices, and an order of them that runs."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.stages, self.count = draw.randint(1, 6), draw.randint(1, 5)
        self.devices = draw.randint(1, self.stages)
        self.placement = [draw.randrange(self.devices) for _ in range(self.stages)]
        self.recompute = [draw.random() < 0.3 for _ in range(self.stages)]
        self.costs = [
            StageCosts(
                draw.random(), draw.random(), draw.random(), draw.choice([None, draw.random()]),
                saved_bytes=draw.random(), freed_by_input_bytes=draw.random() / 2,
                created_by_input_bytes=draw.choice([0.0, draw.random()]), input_bytes=draw.random() / 4,
                recompute_s=draw.choice([None, draw.random()]),
            )
            for _ in range(self.stages)
        ]  # fmt: skip
        pairs = [(a, b) for b in range(self.stages) for a in range(b) if b == a + 1 or draw.random() < 0.3]
        self.edges = [StageEdge(a, b, 8, draw.choice([0, 8, 8])) for a, b in pairs]
        self.latency = np.array([[draw.random() * (a != b) for b in range(self.devices)] for a in range(self.devices)])
        self.rows = self._run()

    def _run(self) -> list[list[Action]]:
        """Each device takes any action whose inputs are there."""
        rows: list[list[Action]] = [[] for _ in range(self.devices)]
        done: set[tuple[Kind, int, int]] = set()
        whole = {(s, m): self.draw.random() < 0.5 for s in range(self.stages) for m in range(self.count)}
        left = [(Kind.F, s, m) for s, m in whole]
        left += [(kind, s, m) for (s, m), b in whole.items() for kind in ((Kind.B,) if b else (Kind.I, Kind.W))]
        while left:
            ready = [each for each in left if self._may_run(*each, done)]
            kind, s, m = self.draw.choice(ready)
            left.remove((kind, s, m))
            done |= {(kind, s, m)} | ({(Kind.I, s, m)} if kind is Kind.B else set())
            rows[self.placement[s]].append(Action(s, kind, m))
        return rows

    def _may_run(self, kind: Kind, s: int, m: int, done: set[tuple[Kind, int, int]]) -> bool:
        if kind is Kind.F:
            return all((Kind.F, e.src, m) in done for e in self.edges if e.dst == s)
        if kind is Kind.W:
            return (Kind.I, s, m) in done
        readers = [e.dst for e in self.edges if e.src == s and e.gradient_bytes > 0]
        return (Kind.F, s, m) in done and all((Kind.I, reader, m) in done for reader in readers)

    def reference(self):
        return evaluate(
            self.rows, self.placement, self.costs, edges=self.edges, hop_s=lambda a, b, _: float(self.latency[a, b]),
            recompute=[s for s, again in enumerate(self.recompute) if again],
        )  # fmt: skip

    def compiled(self, stop=INFINITY):
        """Step, scratch, peaks."""
        none = np.zeros(self.devices)
        machine = MachineArrays(
            none.astype(np.int64), none, self.latency, np.full((self.devices,) * 2, np.inf),
            np.zeros((2, self.devices)), np.zeros((2, 0)), np.zeros((2, 0)), np.zeros(2), no_links(self.devices), False,
        )  # fmt: skip
        placement = np.array(self.placement, dtype=np.int64)
        costs = make_stage_arrays(self.stages, len(self.edges))
        fill_fixed(self.costs, self.edges, placement, np.array(self.recompute), machine, costs)
        orders, lengths = encode(self.rows, self.count)
        scratch = make_scratch(self.stages, self.count, self.devices)
        whole, work = np.zeros(self.stages, dtype=np.int64), np.zeros(self.devices)
        count_whole(orders, lengths, scratch.stage_of, whole)
        work_of(self.count, placement, costs, whole, work)
        step = run(orders, lengths, self.count, placement, costs, work, stop, scratch)
        peaks = [
            peak(orders[d], lengths[d], d, placement, costs, scratch.stage_of) for d in range(self.devices)
        ]  # fmt: skip
        return step, scratch, peaks

    def code(self, action: Action) -> int:
        return KINDS * (action.stage * self.count + action.microbatch) + CODE[action.kind]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_compiled_evaluation_equals_the_reference_exactly(seed):
    case = Case(seed)
    expected = case.reference()
    step, scratch, peaks = case.compiled()
    assert step == expected.makespan
    for row, ends in zip(case.rows, expected.ends, strict=True):
        assert [scratch.finish[case.code(action)] for action in row] == list(ends)
    assert tuple(peaks) == expected.peak_memory
    assert case.compiled(stop=0.9 * step)[0] == INFINITY


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_compiled_evaluation_refuses_the_orders_that_the_reference_refuses(seed):
    case = Case(seed)
    for row in case.rows:
        case.draw.shuffle(row)
    try:
        expected = case.reference().makespan
    except RequestError:
        assert case.compiled()[0] < 0
    else:
        assert case.compiled()[0] == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_held_bytes_reach_the_peak_and_return_to_nothing(seed):
    case = Case(seed)
    again = [s for s, recomputes in enumerate(case.recompute) if recomputes]
    for row, most in zip(case.rows, case.reference().peak_memory, strict=True):
        held = held_bytes(order_changes(row, case.costs, again))
        assert max(held) == most
        assert held[-1] == pytest.approx(0.0, abs=1e-9)
