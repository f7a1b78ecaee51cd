"""A policy that is not in the package (`eight_bits`) is planned, validated, simulated and traced.

How a declared kind is executed is in ``tests/runtimes/engine/test_own_kind.py``.
"""

from itertools import pairwise

import pytest
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.plan.kinds import declared
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import longest_path
from panpipe.core.search.choose import plan as planned
from panpipe.core.search.search_options import SearchOptions
from panpipe.core.trace.perfetto import write_trace
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate

from ...support.programs.eight_bits import KIND, PACK, QUEUE, SECONDS, packed

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
