"""How long planning takes, and how good the plans are. Run: ``pytest benchmarks/bench_planner.py``.

``PANPIPE_OPGRAPH`` names an operator-graph file of GPT-2 large, on which the four rows are those of the table for
Pfeife's planner (its efficiencies stand beside them). Without it a graph like it is made: as many operators, whose
costs repeat from layer to layer, and a heavy head.
"""

import os

import pytest
from panpipe.core.cluster import fully_connected
from panpipe.core.graph import OpEdge, OpGraph, OpNode, read_graph
from panpipe.core.planner.choose import search_plans
from panpipe.core.schedules.registry import families

ROWS = {
    "4x8": (4, 8, 80e9, 0.901),
    "8x8": (8, 8, 24e9, 0.741),
    "8x16": (8, 16, 40e9, 0.829),
    "8x32": (8, 32, 40e9, 0.888),
}
"""Devices, microbatches, memory (85 % of it usable), and the efficiency to hold against."""


def graph_like_gpt2():
    layer = [0.08e-3, 1.2e-3, 0.01e-3, 1.0e-3, 0.45e-3, 0.06e-3, 0.08e-3, 1.57e-3, 0.25e-3, 1.61e-3, 0.06e-3]
    times = [0.4e-3, *layer * 36, 0.08e-3, 9.5e-3, 1e-3]
    nodes = tuple(
        OpNode(f"n{i}", t, t, t, state_bytes=round(t * 60e9), saved_bytes=21_000_000) for i, t in enumerate(times)
    )
    return OpGraph(nodes, tuple(OpEdge(f"n{i}", f"n{i + 1}", 21_000_000) for i in range(len(nodes) - 1)))


@pytest.mark.parametrize("row", ROWS)
def test_plan(benchmark, row):
    devices, microbatches, memory, reference = ROWS[row]
    path = os.environ.get("PANPIPE_OPGRAPH")
    graph = read_graph(path) if path else graph_like_gpt2()
    cluster = fully_connected(devices, int(0.85 * memory), 100e9, 10e-6)
    arguments = {"families": list(families().values())}
    chosen = benchmark.pedantic(search_plans, (graph, cluster, microbatches), arguments, rounds=1).best
    compute_s = sum(node.forward_s + node.backward_input_s + node.backward_weight_s for node in graph.nodes)
    efficiency = microbatches * compute_s / (devices * chosen.prediction.step_s)
    benchmark.extra_info.update(
        schedule=chosen.schedule,
        efficiency=efficiency,
        pfeife_efficiency=reference if path else None,
        evaluations=chosen.prediction.evaluations,
        graph="file" if path else "made",
    )
    assert max(chosen.prediction.peak_memory_bytes) <= 0.85 * memory
