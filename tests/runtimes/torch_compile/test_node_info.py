"""Values, writes and costs of the nodes of a graph, on fake tensors."""

import pytest
import torch
from panpipe.runtimes.torch_compile.node_info import node_info, tensors_of
from torch import fx, nn


def graph_of(function, module=None):
    return fx.symbolic_trace(module if module is not None else function)


def info_of(graph, *arguments, shapes=None):
    found = node_info(graph, arguments, shapes or {})
    return {node.name: info for node, info in found.items()}


def test_shapes_bytes_and_flops_of_a_product():
    found = info_of(graph_of(lambda x, w: x @ w), torch.ones(2, 3), torch.ones(3, 5))
    assert (found["matmul"].shape, found["matmul"].bytes, found["matmul"].flops) == ((2, 5), 40, 60)
    assert found["x"].flops == 0
    assert found["matmul"].tensor
    assert not found["matmul"].several
    assert not found["matmul"].written


def test_argument_may_have_another_shape():
    found = info_of(graph_of(lambda x, w: x @ w), torch.ones(2, 3), torch.ones(3, 5), shapes={0: (7, 3)})
    assert (found["x"].shape, found["matmul"].shape) == ((7, 3), (7, 5))
    with pytest.raises(RuntimeError):
        info_of(graph_of(lambda x, w: x @ w), torch.ones(2, 3), torch.ones(3, 5), shapes={0: (7, 4)})


def test_views_share_a_storage_and_writes_are_recorded():
    def function(x):
        part = x[:1]
        part.add_(1)
        return x * 2

    found = info_of(graph_of(function), torch.ones(2, 3))
    assert found["x"].storage == found["getitem"].storage == found["add_"].storage
    assert found["add_"].written == {found["x"].storage}
    assert found["mul"].storage != found["x"].storage
    assert not found["getitem"].written


def test_tensor_that_is_passed_twice_is_one():
    x = torch.ones(2)
    found = info_of(graph_of(lambda a, b: a + b), x, x)
    assert found["a"].storage == found["b"].storage
    other = info_of(graph_of(lambda a, b: a + b), x, torch.ones(2))
    assert other["a"].storage != other["b"].storage


def test_random_operators_are_counted():
    def function(x):
        return nn.functional.dropout(nn.functional.dropout(x, 0.5), 0.5) * 2

    found = info_of(graph_of(function), torch.ones(2))
    assert [found[name].draws for name in ("dropout", "dropout_1", "mul")] == [1, 1, 0]


def test_results_that_are_several_tensors():
    def function(x):
        first, second = x.chunk(2)
        return first + second

    found = info_of(graph_of(function), torch.ones(4))
    assert found["chunk"].several
    assert not found["chunk"].tensor
    assert found["getitem"].tensor


def test_gradients_flow_from_arguments_that_require_them():
    found = info_of(graph_of(lambda x, w: (x * 2, x * w)), torch.ones(2), torch.ones(2, requires_grad=True))
    assert [found[name].differentiable for name in ("x", "w", "mul", "mul_1")] == [False, True, False, True]


def test_number_that_is_passed_as_a_tensor_keeps_its_value():
    found = info_of(graph_of(lambda x, n: x.new_zeros(n.item())), torch.ones(2), torch.tensor(3))
    assert found["new_zeros"].shape == (3,)


def test_values_of_an_output():
    graph = graph_of(lambda x: (x + 1, [x * 2, None, 3]))
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    assert [getattr(value, "name", value) for value in tensors_of(output)] == ["add", "mul", None, 3]
