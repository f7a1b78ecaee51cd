"""Operators' times scaled to those of their stages."""

import pytest
from panpipe.core.costs.costs import StageCosts, stage_costs
from panpipe.core.costs.graph import OpGraph, OpNode
from panpipe.runtimes.profile.corrected_operators import corrected_graph

GRAPH = OpGraph((OpNode("a", 1.0, 2.0, 0.0), OpNode("b", 3.0, 1.0, 1.0), OpNode("c", 1.0, 0.0, 0.0, saved_bytes=7)))
STAGES = [["a", "b"], ["c"]]


def test_stages_of_the_corrected_graph_take_what_was_measured():
    costs = [StageCosts(8.0, 3.0, 5.0), StageCosts(0.5, 0.0, 0.0)]
    found = corrected_graph(GRAPH, STAGES, costs)
    assert [node.forward_s for node in found.nodes] == [2.0, 6.0, 0.5]
    assert [(node.backward_input_s, node.backward_weight_s) for node in found.nodes] == [(4, 0), (2, 2), (0, 0)]
    for mine, theirs in zip(stage_costs(found, STAGES), costs, strict=True):
        assert (mine.forward_s, mine.full_backward_s) == pytest.approx((theirs.forward_s, theirs.full_backward_s))
    assert found.nodes[2].saved_bytes == 7
    assert found.hash == GRAPH.hash


def test_whole_backward_counts_where_it_was_measured():
    found = corrected_graph(GRAPH, STAGES, [StageCosts(4.0, 3.0, 5.0, backward_s=2.0), StageCosts(1.0, 0.0, 0.0)])
    assert [node.backward_input_s for node in found.nodes] == [1.0, 0.5, 0.0]
