"""Changes to the recorded program of a tensor rank: views without effect, and collectives."""

import pytest
import torch
import torch.distributed._functional_collectives
from panpipe.core.capture.graph.tensor_collectives import ALL_GATHER, ALL_REDUCE, MAX, REDUCE_SCATTER, SUM
from panpipe.core.errors import RequestError
from panpipe.runtimes.tensor_parallel.recorded_graph import drop_views, replace_collectives
from torch import fx

aten, functional = torch.ops.aten, torch.ops._c10d_functional
GROUP = "group"


@pytest.fixture
def graph():
    return fx.Graph()


@pytest.fixture
def x(graph):
    return graph.placeholder("x")


def waited(graph, target, *arguments):
    return graph.call_function(functional.wait_tensor.default, (graph.call_function(target, arguments),))


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_view_of_the_same_shape_is_dropped(graph, x):
    x.meta["val"] = torch.ones(2, 3)
    same, other = (graph.call_function(aten.view.default, (x, shape)) for shape in ([2, 3], [6]))
    same.meta["val"], other.meta["val"] = torch.ones(2, 3), torch.ones(6)
    total = graph.call_function(aten.relu.default, (same,))
    graph.output((total, other))
    drop_views(graph)
    assert targets(graph) == [aten.view.default, aten.relu.default]
    assert total.args == (x,)


def test_collectives_of_sums_are_replaced_and_waits_dropped(graph, x):
    summed = waited(graph, functional.all_reduce.default, x, SUM, GROUP)
    whole = waited(graph, functional.all_gather_into_tensor.default, summed, 2, GROUP)
    part = waited(graph, functional.reduce_scatter_tensor.default, whole, SUM, 2, GROUP)
    graph.output(part)
    replace_collectives(graph)
    graph.lint()
    first, second, third = (node for node in graph.nodes if node.op == "call_function")
    assert targets(graph) == [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER]
    assert first.args == (x, SUM)
    assert second.args == (first, 2)
    assert third.args == (second, 2)


def log_softmax(graph, x, subtracted=None):
    """x − max, minus the logarithm of the sum of its exponentials, as tensor ranks compute it together."""
    largest = waited(graph, functional.all_reduce.default, x, MAX, GROUP)
    shifted = graph.call_function(aten.sub.Tensor, (x, largest))
    exponent = graph.call_function(aten.exp.default, (shifted,))
    total = graph.call_function(aten.sum.dim_IntList, (exponent, [1], True))
    total = waited(graph, functional.all_reduce.default, total, SUM, GROUP)
    logarithm = graph.call_function(aten.log.default, (total,))
    return largest, graph.call_function(aten.sub.Tensor, (subtracted or shifted, logarithm))


def test_maximum_before_a_softmax_is_replaced(graph, x):
    _, result = log_softmax(graph, x)
    graph.output(result)
    replace_collectives(graph)
    assert targets(graph).count(ALL_REDUCE) == 2


def test_maximum_that_is_used_otherwise_is_refused(graph, x):
    largest, result = log_softmax(graph, x)
    graph.output((result, graph.call_function(aten.relu.default, (largest,))))
    with pytest.raises(RequestError, match=f"need all_reduce of '{MAX}' between tensor ranks"):
        replace_collectives(graph)


def test_logarithm_that_is_not_subtracted_from_the_shifted_values_is_refused(graph, x):
    _, result = log_softmax(graph, x, subtracted=x)
    graph.output(result)
    with pytest.raises(RequestError, match="sums, all-gathers and reduce-scatters of sums are supported"):
        replace_collectives(graph)


@pytest.mark.parametrize(
    ("target", "arguments", "said"),
    [
        (functional.all_reduce.default, ("product", GROUP), "need all_reduce of 'product'"),
        (functional.reduce_scatter_tensor.default, ("max", 2, GROUP), "need reduce_scatter_tensor of 'max'"),
        (functional.broadcast.default, (0, GROUP), "need broadcast between"),
    ],
)
def test_other_communication_is_refused(graph, x, target, arguments, said):
    graph.output(waited(graph, target, x, *arguments))
    with pytest.raises(RequestError, match=said):
        replace_collectives(graph)
