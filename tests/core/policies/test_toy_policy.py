"""A policy that is not in the package (`eight_bits`) is planned, validated, simulated, traced and executed."""

import threading
from itertools import pairwise

import pytest
import torch
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.errors import RequestError
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import longest_path
from panpipe.core.search.choose import plan as planned
from panpipe.core.search.search_options import SearchOptions
from panpipe.core.trace.compare import compare
from panpipe.core.trace.perfetto import write_trace
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.core.validation.validate import validate
from panpipe.runtimes.engine.instructions.instructions import INSTRUCTIONS, Binder, Instruction
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.simulators.run import simulate

from ...support.cuts import captured, even_plan
from ...support.held import simulated
from ...support.models import CASES
from ...support.parity import build
from ...support.programs.eight_bits import KIND, PACK, QUEUE, SECONDS, declared, packed

NODES = tuple(OpNode(f"n{i}", 1.0, 1.0, 1.0, saved_bytes=10, workspace_bytes=3) for i in range(4))
GRAPH = OpGraph(NODES, tuple(OpEdge(a.name, b.name, 40) for a, b in pairwise(NODES)))
CLUSTER = fully_connected(2, 10**6, 100.0, 0.0)


def plan_of(graph):
    return planned(graph, CLUSTER, 4, SearchOptions(families=[find_family("1f1b")], anneal=False, oracle=longest_path))


def test_policy_of_a_test_changes_bytes_times_and_memory(tmp_path):
    whole = plan_of(GRAPH)
    with declared(KIND):
        found = plan_of(packed(GRAPH))
        result, report = simulate(found), validate(found)
        trace, peaks = result.trace, result.peak_saved_bytes
    assert [edge.bytes for edge in found.edges] == [10]
    assert found.predicted.step_s < whole.predicted.step_s  # messages take 0.1 s in place of 0.4
    assert result.step_s == pytest.approx(found.predicted.step_s)
    packing = [event for event in trace.events if event.queue == QUEUE]
    assert [event.action.kind for event in packing] == [PACK] * 4
    assert [event.end_s - event.start_s for event in packing] == pytest.approx([SECONDS] * 4)
    # The first device holds the packed copies of two microbatches in addition to their saved tensors.
    assert report.peak_saved_bytes == peaks == (validate(found).peak_saved_bytes[0] + 2 * 3, 20)
    write_trace(trace, tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == trace


class Packing:
    """A PACK under way."""

    def __init__(self, waited, action):
        self.waited, self.action = waited, action

    def wait(self):
        self.waited.append(str(self.action))


def test_policy_of_a_test_is_executed_as_simulated(monkeypatch):
    packed_bytes, waited, lock = {}, [], threading.Lock()

    def bind(binder: Binder, action) -> Instruction:
        frame, run = binder.frame, binder.run_of(action)

        def pack() -> None:
            held = [t for t in run.held(action.microbatch) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            small = [(127 * t / t.abs().max().clamp(min=1e-30)).to(torch.int8) for t in held]
            with lock:
                packed_bytes[str(action)] = sum(t.nbytes for t in small) / sum(t.nbytes for t in held)
            frame.pending[action] = Packing(waited, action)

        return Instruction(action, None, pack, None, QUEUE)

    name, dtype = "tied gpt with dropout", torch.float32
    case = CASES[name]
    plan = even_plan(captured(case, dtype, 8, 4), 2, 4)
    with declared(KIND), monkeypatch.context() as patch:
        patch.setitem(INSTRUCTIONS, PACK, bind)
        pipe = build(ThreadTeam(2), name, dtype, 8, plan, 4)
        pipe.step(case.batch(8, dtype))
        _, trace = pipe.trace_step(case.batch(8, dtype))
        predicted = simulated(pipe.plan, pipe).trace
    names = [f"0PACK{m}" for m in range(4)]
    assert packed_bytes == dict.fromkeys(names, 0.25)
    assert sorted(waited) == sorted(2 * names)  # two steps
    events = {str(e.action): e for e in trace.events}
    for m, name in enumerate(names):
        event = events[name]
        assert event.queue == QUEUE
        assert events[f"0F{m}"].end_s <= event.start_s <= event.end_s <= events[f"0B{m}"].start_s
    compared = compare(predicted, trace)
    assert {each.kind: each.count for each in compared.kinds}[PACK] == len(names)
    assert not compared.only_predicted
    assert not compared.only_measured


def test_kind_without_a_registered_instruction_is_refused():
    case = CASES["tied gpt with dropout"]
    plan = even_plan(captured(case, torch.float32, 8, 4), 2, 4)
    with (
        declared(KIND),
        pytest.raises(RequestError, match="and no instruction is registered for PACK: remove it, or register one"),
    ):
        build(ThreadTeam(2), "tied gpt with dropout", torch.float32, 8, plan, 4).step(case.batch(8, torch.float32))
