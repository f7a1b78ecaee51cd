"""Operators that stay together cost what they do as a stage, and plans of blocks name operators."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import stage_costs
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.errors import RequestError
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.choose import plan
from panpipe.core.search.problem.assemble import with_replicas
from panpipe.core.search.problem.blocks import Blocks
from panpipe.core.search.search_options import SearchOptions


@st.composite
def layered(draw):
    """A graph of layers of some operators, with skip edges, several readers of a tensor, frozen parameters, and a tied
    parameter whose state is that of its first reader."""
    numbers, states = st.integers(0, 9), st.sampled_from([4, 8, 12, 13])
    names = [f"layers.{i}.part{j}/mm" for i in range(draw(st.integers(2, 4))) for j in range(draw(st.integers(1, 3)))]
    names = ["embedding/e", *names, "/loss"]
    nodes = [
        OpNode(name, *(float(draw(numbers)) + 1 for _ in range(4)), 4, 0 if name == "/loss" else draw(states),
               *(draw(numbers) for _ in range(2)), ("tied",) if name in ("embedding/e", "/loss") else (f"p.{name}",))
        for name in names
    ]  # fmt: skip
    edges = [OpEdge(a, b, draw(numbers), draw(st.booleans())) for a, b in pairwise(names)]
    for _ in range(draw(st.integers(0, 4))):
        i, j = sorted(draw(st.lists(st.integers(0, len(names) - 1), min_size=2, max_size=2, unique=True)))
        edges.append(OpEdge(names[i], names[j], 5, True, draw(st.integers(1, 2))))
    return OpGraph(tuple(nodes), tuple(edges), name="layered")


@given(layered())
def test_plans_of_blocks_name_operators_and_end_between_layers(graph):
    blocks = Blocks.of(graph, "layers")
    options = SearchOptions(families=[find_family("1f1b")], budget=50)
    found = plan(blocks.joined(graph), fully_connected(2, 10**6, 10.0, 0.1), 2, options, parameter_sizes=blocks.sizes)
    expanded = blocks.expanded(found)
    assert expanded.graph_hash == graph.hash
    assert [name for stage in expanded.stages for name in stage.nodes] == [node.name for node in graph.nodes]
    starts = {names[0] for names in blocks.operators}
    assert all(stage.nodes[0] in starts for stage in expanded.stages)
    costs = stage_costs(graph, [stage.nodes for stage in expanded.stages])
    assert with_replicas(graph, costs, found.tied) == found.predicted.costs


def test_more_devices_than_blocks_are_refused():
    graph = OpGraph(tuple(OpNode(f"layers.{i}/{part}", 1.0) for i in range(3) for part in "ab"))
    with pytest.raises(
        RequestError, match=r"there are 4 devices for 3 layers and parts around them.*at most 3 devices"
    ):
        Blocks.of(graph, "layers").refuse_too_few(4)
    Blocks.of(graph, "operators").refuse_too_few(4)
