"""Recurrent operators of several layers, split into one operator per layer so that a cut may be between the layers.

`nn.LSTM`, `nn.GRU` and `nn.RNN` call one operator for all layers, with dropout between them. The operator for one
layer, called layer by layer, computes the same numbers in the same order. Between the layers the time dimension is
first, as inside the operator, so that dropout draws its masks in the same shapes.
"""

import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from .nodes import inserted_call

aten = torch.ops.aten

_STATES = {
    aten.lstm.input: 2,
    aten.gru.input: 1,
    aten.rnn_tanh.input: 1,
    aten.rnn_relu.input: 1,
}
"""Recurrent operators, and the number of states that they carry from one time to the next.

All take (input, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first).
"""


def split_layers(graph: fx.Graph) -> None:
    """Replace every recurrent operator of several layers by one operator per layer, with dropout between them.

    Args:
        graph: a captured graph; changed in place.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _STATES:
            layers: Any = node.args[4]
            if layers > 1:
                _split(graph, node)


def _split(graph: fx.Graph, node: fx.Node) -> None:
    arguments: tuple[Any, ...] = node.args
    x, states, weights, biases, layers, dropout, train, bidirectional, batch_first = arguments
    states = list(states) if isinstance(states, list | tuple) else [states]
    size, directions = len(weights) // layers, 2 if bidirectional else 1
    ends: list[list[fx.Node]] = [[] for _ in states]

    call = partial(inserted_call, graph, node)
    with graph.inserting_before(node):
        x = call(aten.transpose.int, x, 0, 1) if batch_first else x
        for layer in range(layers):
            first = layer * directions
            given = [call(aten.slice.Tensor, state, 0, first, first + directions) for state in states]
            own = weights[layer * size : (layer + 1) * size]
            carried = given if len(given) > 1 else given[0]
            result = call(node.target, x, carried, own, biases, 1, 0.0, train, bidirectional, False)
            x = call(operator.getitem, result, 0)
            for number, end in enumerate(ends):
                end.append(call(operator.getitem, result, number + 1))
            if layer < layers - 1 and dropout > 0:
                x = call(aten.dropout.default, x, dropout, train)
        x = call(aten.transpose.int, x, 0, 1) if batch_first else x
        for user in list(node.users):
            place: Any = user.args[1]
            if user.users:
                user.replace_all_uses_with(x if place == 0 else call(aten.cat.default, ends[place - 1]))
            graph.erase_node(user)
    graph.erase_node(node)
