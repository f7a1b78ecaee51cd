"""Recurrent operators of several layers, split by hand: the same numbers, one operator a layer, dropout in between."""

import operator

import pytest
import torch
from panpipe.core.capture.graph.rewrites import split_layers
from torch import fx, nn

aten = torch.ops.aten
WIDTH, TIMES, ROWS = 3, 4, 2
KINDS = {
    nn.LSTM: (aten.lstm.input, 2),
    nn.GRU: (aten.gru.input, 1),
    nn.RNN: (aten.rnn_tanh.input, 1),
}


def graph_of(layer, x, dropout=0.0, results=(0, 1)):
    """A graph that calls the layer's operator, and its inputs."""
    target, count = KINDS[type(layer)]
    directions = 2 if layer.bidirectional else 1
    states = [torch.randn(layer.num_layers * directions, ROWS, WIDTH) for _ in range(count)]
    graph = fx.Graph()
    given = [graph.placeholder("x"), *(graph.placeholder(f"state{i}") for i in range(count))]
    weights = [graph.placeholder(f"weight{i}") for i in range(len(layer._flat_weights))]
    carried = given[1:] if count > 1 else given[1]
    arguments = (
        given[0], carried, weights, True, layer.num_layers, dropout, False, layer.bidirectional, layer.batch_first,
    )  # fmt: skip
    node = graph.call_function(target, arguments)
    graph.output(tuple(graph.call_function(operator.getitem, (node, i)) for i in results))
    return graph, [x, *states, *layer._flat_weights]


def run(graph, inputs):
    graph.lint()
    with torch.no_grad():
        return fx.Interpreter(fx.GraphModule({}, graph)).run(*inputs)


def calls(graph, target):
    return [node for node in graph.nodes if node.target is target]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_layers_one_by_one_compute_the_same(kind, batch_first, bidirectional):
    torch.manual_seed(0)
    layer = kind(WIDTH, WIDTH, 3, bidirectional=bidirectional, batch_first=batch_first)
    x = torch.randn((ROWS, TIMES, WIDTH) if batch_first else (TIMES, ROWS, WIDTH))
    results = range(1 + KINDS[kind][1])
    graph, inputs = graph_of(layer, x, results=results)
    wanted = run(graph, inputs)
    split_layers(graph)
    found = run(graph, inputs)
    target = KINDS[kind][0]
    assert [node.args[4] for node in calls(graph, target)] == [1, 1, 1]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_dropout_is_between_layers_and_not_after_the_last():
    graph, _ = graph_of(nn.GRU(WIDTH, WIDTH, 3), torch.zeros(TIMES, ROWS, WIDTH), dropout=0.5)
    split_layers(graph)
    assert [node.args[1:] for node in calls(graph, aten.dropout.default)] == [(0.5, False)] * 2
    assert [node.args[5] for node in calls(graph, aten.gru.input)] == [0.0] * 3


def test_time_is_first_between_layers():
    graph, _ = graph_of(nn.GRU(WIDTH, WIDTH, 2, batch_first=True), torch.zeros(ROWS, TIMES, WIDTH))
    split_layers(graph)
    assert [node.args[8] for node in calls(graph, aten.gru.input)] == [False, False]
    assert len(calls(graph, aten.transpose.int)) == 2


def test_operator_of_one_layer_is_left_alone():
    graph, _ = graph_of(nn.GRU(WIDTH, WIDTH, 1), torch.zeros(TIMES, ROWS, WIDTH))
    before = str(graph)
    split_layers(graph)
    assert str(graph) == before


def test_result_that_nobody_reads_is_dropped():
    graph, inputs = graph_of(nn.GRU(WIDTH, WIDTH, 2), torch.zeros(TIMES, ROWS, WIDTH), results=(0,))
    (node,) = calls(graph, aten.gru.input)
    with graph.inserting_after(node):
        graph.call_function(operator.getitem, (node, 1))
    split_layers(graph)
    assert not calls(graph, aten.cat.default)
    run(graph, inputs)
