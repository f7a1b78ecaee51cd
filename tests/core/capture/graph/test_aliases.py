"""Writes into the batch, dropout that drops nothing, and detaching in place, on graphs made by hand."""

import torch
from panpipe.core.capture.graph.rewrites import copy_written, rewrite_aliases
from torch import fx

aten = torch.ops.aten


def graph_of(*names):
    graph = fx.Graph()
    return graph, *(graph.placeholder(name) for name in names)


def run(graph, *values):
    graph.lint()
    return fx.Interpreter(fx.GraphModule({}, graph)).run(*values)


def test_step_that_writes_into_its_batch_writes_into_a_copy():
    graph, x, w = graph_of("x", "w")
    view = graph.call_function(aten.view.default, (x, [2]))
    graph.call_function(aten.mul_.Tensor, (view, w))
    graph.output(graph.call_function(aten.add.Tensor, (x, w)))
    copy_written(graph, {"x"})
    batch, weight = torch.ones(2), torch.full((2,), 3.0)
    assert run(graph, batch, weight).tolist() == [6.0, 6.0]
    assert batch.tolist() == [1.0, 1.0]


def test_other_placeholders_are_written_themselves():
    graph, x, w = graph_of("x", "w")
    graph.output(graph.call_function(aten.mul_.Tensor, (w, x)))
    copy_written(graph, {"x"})
    weight = torch.full((2,), 3.0)
    run(graph, torch.full((2,), 2.0), weight)
    assert weight.tolist() == [6.0, 6.0]


def test_dropout_that_drops_nothing_is_its_input():
    for rate, training in ((0.0, True), (0.5, False)):
        graph, x = graph_of("x")
        kept = graph.call_function(aten.dropout.default, (x, rate, training))
        graph.output(graph.call_function(aten.relu.default, (kept,)))
        rewrite_aliases(graph)
        assert [node.target for node in graph.nodes if node.op == "call_function"] == [aten.relu.default]
        assert run(graph, torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_dropout_that_drops_something_stays():
    graph, x = graph_of("x")
    graph.output(graph.call_function(aten.dropout.default, (x, 0.5, True)))
    rewrite_aliases(graph)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [aten.dropout.default]


def test_only_what_comes_after_detaching_in_place_is_detached():
    graph, x = graph_of("x")
    y = graph.call_function(aten.mul.Tensor, (x, 2))
    before = graph.call_function(aten.sum.default, (y,))
    graph.call_function(aten.detach_.default, (y,))
    after = graph.call_function(aten.sum.default, (y,))
    graph.output((before, after))
    rewrite_aliases(graph)
    first, second = run(graph, torch.ones(2, requires_grad=True))
    assert (first.requires_grad, second.requires_grad) == (True, False)
    assert first.item() == second.item() == 4.0
