"""The calls of operators: torch's bindings where these dispatch the very same operator with the same arguments."""

import pytest
import torch
from panpipe.core.capture.programs.bindings import binding_of, same_tensor
from panpipe.core.capture.programs.generated_code import compile_program, no_sink
from torch import fx

from ....support.nodes import node, placeholder

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "arguments", "wanted"),
    [
        (aten.mm.default, 2, torch.mm),
        (aten.add.Tensor, 2, torch.add),
        (aten.gelu.default, 1, torch._C._nn.gelu),
        (aten.t.default, 1, torch.t),
        (aten.sum.default, 1, torch.sum),
    ],
)
def test_operators_are_called_by_their_bindings(target, arguments, wanted):
    graph = fx.Graph()
    inputs = [placeholder(graph, name) for name in "xy"[:arguments]]
    assert binding_of(node(graph, target, *inputs)) is wanted


def test_a_view_is_called_by_its_method():
    graph = fx.Graph()
    assert binding_of(node(graph, aten.view.default, placeholder(graph, "x"), [2, 8])) is torch.Tensor.view


def test_operators_without_a_binding_of_the_same_arguments_are_called_directly():
    graph = fx.Graph()
    x = placeholder(graph, "x")
    for made in (
        node(graph, aten._to_copy.default, x, dtype=torch.float32),  # no binding
        node(graph, aten.split.Tensor, x, 2),  # a function in Python
        node(graph, aten.reshape.default, x, [16]),  # it dispatches to views
        node(graph, aten.add.Scalar, x, 1.0),  # the binding dispatches to another overload
        node(graph, aten.full.default, [2], 1.0),  # a binding obeys the default device
    ):
        assert binding_of(made) is made.target._op, made.target


def test_views_of_all_of_a_tensor_are_left_out():
    graph = fx.Graph()
    x = placeholder(graph, "x")
    whole = node(graph, aten.view.default, x, [4, 4])
    flat = node(graph, aten.view.default, x, [16])
    negative = node(graph, aten._neg_view.default, x)
    assert same_tensor(whole) is x
    assert same_tensor(node(graph, aten.detach.default, x)) is x
    assert same_tensor(flat) is same_tensor(negative) is None
    double = node(graph, aten.mul.Tensor, whole, 2.0)
    value = x.meta["val"].clone()
    [found] = compile_program([whole, double], [x], [double], {})([value], no_sink)
    assert torch.equal(found, 2 * value)


def test_a_returned_view_is_a_tensor_of_its_own():
    graph = fx.Graph()
    x = placeholder(graph, "x")
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    detached = node(graph, aten.detach.default, x)
    [found] = compile_program([detached], [x], [detached], {})([parameter], no_sink)
    assert found is not parameter
    assert not found.requires_grad
