"""The inputs of planning: a graph's file, wrong options of a model, the user's numbers, the error of a step."""

from types import SimpleNamespace

import pytest
from panpipe.answers.plan import costs as module
from panpipe.answers.plan.costs import ModelRequest, PlanningCosts, graph_costs, model_costs
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpGraph, OpNode, graph_json
from panpipe.core.errors import RequestError
from panpipe.core.trace.throughput import StepTotals

GRAPH = OpGraph((OpNode("a", 1, 1, 1, 0, 0, 0, 0, 0), OpNode("b", 2, 1, 1, 0, 0, 0, 0, 0)), ())
CLUSTER = fully_connected(2, 10**9, 1e9, 0.0)


def test_costs_of_a_file(tmp_path):
    (tmp_path / "graph.json").write_text(graph_json(GRAPH))
    found = graph_costs(tmp_path / "graph.json", StepTotals(samples=3))
    assert [node.forward_s for node in found.graph.nodes] == [1, 2]
    assert (found.by_type, found.parameter_sizes, found.work.samples) == ({}, None, 3)
    assert found.graphs == (found.graph,)


def test_graphs_of_each_type():
    other = OpGraph((OpNode("a", 5, 1, 1, 0, 0, 0, 0, 0),), ())
    assert PlanningCosts(GRAPH, {"x": GRAPH, "y": other}, None, StepTotals()).graphs == (GRAPH, other)


def test_blocks_join_every_graph():
    blocks = SimpleNamespace(joined=lambda graph: OpGraph(graph.nodes[:1], ()), sizes={"w": 4})
    costs = PlanningCosts(GRAPH, {"x": GRAPH}, None, StepTotals()).joined(blocks)
    assert [len(costs.graph.nodes), len(costs.by_type["x"].nodes)] == [1, 1]
    assert costs.parameter_sizes == {"w": 4}
    assert PlanningCosts(GRAPH, {}, {"v": 8}, StepTotals()).joined(blocks).parameter_sizes == {"v": 8}


def test_wrong_options_are_refused_before_the_model_is_captured():
    with pytest.raises(RequestError, match="there is no number type 'fp7': use one of"):
        model_costs(ModelRequest("mlp", dtype="fp7"), CLUSTER, "x", 2, StepTotals())
    with pytest.raises(RequestError, match="there is no optimizer 'x': use one of"):
        model_costs(ModelRequest("mlp", optimizer="x"), CLUSTER, "x", 2, StepTotals())
    with pytest.raises(RequestError, match="device0"):
        model_costs(ModelRequest("mlp"), CLUSTER, "x", 2, StepTotals())  # without a type


@pytest.mark.parametrize(("errors", "wanted"), [((0.1, 0.3), 0.3), ((0.1, None), None), ((None,), None)])
def test_error_of_a_step_is_the_largest_if_all_are_known(errors, wanted):
    assert module._step_error([SimpleNamespace(step_error=error) for error in errors]) == wanted


def test_users_numbers_have_precedence():
    found = module._known(StepTotals(samples=0, tokens=None), StepTotals(samples=8, tokens=9, flops=10))
    assert (found.samples, found.tokens, found.flops) == (0, 9, 10)
