"""Which operators may be part of a fused one, and which nodes show one tensor of another."""

import operator

import pytest
import torch
from panpipe.core.capture.programs.recomputed import fusible, is_single_view, parts, values_of
from torch import fx

from ....support.nodes import node, placeholder

aten = torch.ops.aten


def of(target, *more, dtype=torch.float32):
    graph = fx.Graph()
    return node(graph, target, placeholder(graph, "x", dtype), *more)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (of(aten.relu.default), True),  # element by element
        (of(aten.add.Tensor, 2.0), True),
        (of(aten._softmax.default, -1, False), True),  # along rows
        (of(aten.native_layer_norm.default, [4], None, None, 1e-5), True),
        (of(aten.mm.default, torch.ones(4, 4)), False),  # a kernel of its own
        (of(aten.relu_.default), False),  # writes in place
        (of(aten.bernoulli.p, 0.5), False),  # draws
        (of(aten.neg.default, dtype=torch.complex64), False),
        (of(torch.relu), False),  # no operator
    ],
    ids=str,
)
def test_operators_are_fusible_by_their_kind(made, expected):
    assert fusible(made) == expected


def test_tensors_on_several_devices_are_not_fused():
    made = of(aten.add.Tensor, 2.0)
    assert fusible(made)
    made.meta["val"] = made.meta["val"].to("meta")
    assert not fusible(made)


def test_nodes_that_show_one_tensor_of_another():
    assert is_single_view(of(aten.t.default))
    assert not is_single_view(of(aten.relu.default))
    assert not is_single_view(of(aten.split.Tensor, 2))  # several
    assert not is_single_view(of(aten.relu_.default))


def test_values_and_parts_of_several_results():
    made = of(aten.native_layer_norm.default, [4], None, None, 1e-5)
    first = made.graph.call_function(operator.getitem, (made, 0))
    made.graph.call_function(aten.relu.default, (first,))
    assert parts(made) == [first]
    assert len(values_of(made)) == 3
    made.meta["val"] = (*made.meta["val"][:2], None)
    assert len(values_of(made)) == 2
    assert values_of(of(aten.relu.default))[0].shape == (4, 4)
