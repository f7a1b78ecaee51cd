"""Stage costs and stage edges, from small graphs by hand."""

import pytest
from panpipe.core.costs.costs import StageCosts, StageEdge, stage_costs, stage_edges
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode


def graph_of(*edges):
    return OpGraph(tuple(OpNode(name) for name in "abcd"), edges)


EACH = [["a"], ["b"], ["c"], ["d"]]


def test_a_stage_costs_the_sum_of_its_nodes_and_the_largest_workspace():
    nodes = (
        OpNode("a", 1.0, 2.0, 3.0, 4.0, parameter_bytes=10, state_bytes=40, saved_bytes=5, workspace_bytes=7),
        OpNode("b", 0.5, 0.5, 0.5, 0.5, parameter_bytes=1, state_bytes=4, saved_bytes=6, workspace_bytes=3),
    )
    (cost,) = stage_costs(OpGraph(nodes), [["a", "b"]])
    assert cost == StageCosts(
        1.5, 2.5, 3.5, None, 4.5, parameter_bytes=11, gradient_bytes=11, optimizer_bytes=22, saved_bytes=11,
        workspace_bytes=7, largest_gradient_bytes=10,
    )  # fmt: skip
    assert cost.state_bytes == 44
    assert cost.full_backward_s == 6.0


@pytest.mark.parametrize(
    ("parameters", "state", "split"),
    [(10, 10, (10, 0, 0)), (10, 15, (10, 5, 0)), (10, 4, (4, 0, 0)), (0, 6, (0, 0, 6))],
)
def test_state_bytes_are_split_into_parameters_gradients_and_optimizer(parameters, state, split):
    (cost,) = stage_costs(OpGraph((OpNode("a", parameter_bytes=parameters, state_bytes=state),)), [["a"]])
    assert (cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes) == split
    assert cost.state_bytes == state


def test_frozen_parameters_and_later_readers_have_no_gradient():
    nodes = (
        OpNode("frozen", parameter_bytes=100, state_bytes=100),
        OpNode("trained", parameter_bytes=10, state_bytes=40, parameters=("w",)),
        OpNode("partly", parameter_bytes=50, state_bytes=50 + 2 * 3, trained_bytes=2),
        OpNode("reads it again", parameter_bytes=10, parameters=("w",)),
    )
    (cost,) = stage_costs(OpGraph(nodes), [[node.name for node in nodes]])
    assert (cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes) == (160, 12, 24)
    assert cost.largest_gradient_bytes == 10


def test_full_backward_with_a_separate_time_is_used():
    assert StageCosts(1, 2, 3, backward_s=4).full_backward_s == 4


def test_a_tensor_goes_once_to_each_stage_that_reads_it():
    graph = graph_of(OpEdge("a", "c", 8), OpEdge("a", "d", 8))
    assert stage_edges(graph, [["a", "b"], ["c", "d"]]) == (StageEdge(0, 1, 8, 8),)
    assert stage_edges(graph, EACH) == (StageEdge(0, 2, 8, 8), StageEdge(0, 3, 8, 8))


def test_two_tensors_between_two_stages_travel_as_one_message():
    graph = graph_of(OpEdge("a", "c", 8), OpEdge("b", "c", 4), OpEdge("a", "c", 2, tensor=1))
    assert stage_edges(graph, [["a", "b"], ["c", "d"]]) == (StageEdge(0, 1, 14, 14),)


def test_tensor_that_is_not_differentiable_has_no_gradient_message():
    graph = graph_of(OpEdge("a", "b", 8, gradient=False), OpEdge("a", "b", 4, tensor=1))
    assert stage_edges(graph, EACH) == (StageEdge(0, 1, 12, 4),)
    graph = graph_of(OpEdge("a", "b", 8, gradient=False))
    assert stage_edges(graph, EACH) == (StageEdge(0, 1, 8, 0),)


def test_tensor_without_bytes_has_a_gradient_message():
    graph = graph_of(OpEdge("a", "b", 0), OpEdge("b", "c", 0, gradient=False))
    assert stage_edges(graph, EACH) == (StageEdge(0, 1, 0, 1), StageEdge(1, 2, 0, 0))


def test_one_differentiable_reader_is_enough():
    graph = graph_of(OpEdge("a", "c", 8, gradient=False), OpEdge("a", "d", 8))
    assert stage_edges(graph, [["a", "b"], ["c", "d"]]) == (StageEdge(0, 1, 8, 8),)


def test_edges_inside_a_stage_are_no_messages():
    assert stage_edges(graph_of(OpEdge("a", "b", 8)), [["a", "b"], ["c", "d"]]) == ()


def test_the_inputs_of_a_stage_are_the_tensors_that_it_reads_from_others_each_once():
    graph = graph_of(OpEdge("a", "c", 8), OpEdge("a", "d", 6), OpEdge("b", "d", 4, gradient=False), OpEdge("c", "d", 2))
    assert [cost.input_bytes for cost in stage_costs(graph, [["a", "b"], ["c", "d"]])] == [0, 12]
    assert [cost.input_bytes for cost in stage_costs(graph, EACH)] == [0, 0, 8, 12]


def test_recompute_takes_as_long_as_forward_unless_it_is_known():
    assert StageCosts(1, 2, 3).second_forward_s == 1
    assert StageCosts(1, 2, 3, recompute_s=0.5).second_forward_s == 0.5
