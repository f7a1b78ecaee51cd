"""The joint graph of a stage: inputs and outputs by meaning, and its division into F, I and W."""

import operator

import pytest
import torch
from panpipe.core.capture.graph.nodes import ancestors
from panpipe.core.capture.programs.joint_graph import (
    closed_over,
    dropout_as_eager,
    forward_nodes,
    ordered,
    selecting_nodes,
    split_masked,
    trace_joint,
)
from panpipe.core.errors import RequestError
from torch import fx, nn

from ....support.stages.graphs import operators, stages

aten = torch.ops.aten


def mean(model, batch):
    return model(batch).mean()


def joint_of(model, batch, *starts, index=0, **options):
    return trace_joint(stages(operators(model, mean, batch), *starts)[index], **options)


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_inputs_and_outputs_by_position():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    joint = joint_of(model, torch.ones(2, 3))
    assert list(joint.primals) == list(range(len(joint.primals)))
    assert [tuple(node.meta["val"].shape) for node in joint.outputs] == [()]
    assert list(joint.tangents) == [0]
    shapes = {i: tuple(joint.primals[i].meta["val"].shape) for i in joint.gradients}
    assert shapes == {i: tuple(node.meta["val"].shape) for i, node in joint.gradients.items()}
    assert sorted(shapes.values()) == [(4,), (4,), (4,), (4, 3)]
    assert list(joint.gradients) == sorted(joint.gradients)
    assert sorted(tuple(node.meta["val"].shape) for node in joint.mutations.values()) == [(), (4,), (4,)]


def test_later_stage_has_a_gradient_for_its_boundary_input():
    joint = joint_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.ones(2, 3), 1, index=1)
    assert tuple(joint.gradients[0].meta["val"].shape) == (2, 4)
    assert joint.mutations == {}


def test_forward_does_not_depend_on_tangents():
    joint = joint_of(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.ones(2, 3))
    forward = forward_nodes(joint)
    assert set(joint.outputs) <= forward
    assert not ancestors(joint.gradients.values()) <= forward
    assert not any(tangent in node.all_input_nodes for node in forward for tangent in joint.tangents.values())
    assert aten.tanh.default in {node.target for node in forward}
    assert aten.tanh_backward.default not in {node.target for node in forward}


def test_forward_selects_all_results_of_its_operators():
    joint = joint_of(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), torch.ones(2, 3))
    forward = forward_nodes(joint)
    (norm,) = (node for node in forward if node.target is aten.native_layer_norm.default)
    assert {user.args[1] for user in norm.users if user.target is operator.getitem and user in forward} == {0, 1, 2}


def graph_of(*calls):
    """A graph of calls: (name, target, arguments by name or value), inputs are a and b."""
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in "ab"}
    for name, target, *given in calls:
        nodes[name] = graph.call_function(target, tuple(nodes.get(g, g) if isinstance(g, str) else g for g in given))
    return graph, nodes


def test_ancestors_of_nodes_are_found_and_ordered():
    graph, n = graph_of(("c", abs, "a"), ("d", abs, "c"), ("e", operator.add, "b", "d"), ("f", abs, "b"))
    assert ancestors([n["d"]]) == {n["c"], n["d"]}
    assert ancestors([n["e"], n["f"]]) == {n["c"], n["d"], n["e"], n["f"]}
    assert closed_over([n["e"], n["d"]], {n["d"]}) == [n["b"], n["c"]]
    assert ordered(graph, {n["e"], n["c"], n["a"]}) == [n["a"], n["c"], n["e"]]


def test_gradient_that_is_only_selected():
    _, n = graph_of(("c", abs, "a"), ("d", operator.getitem, "c", 0), ("e", operator.getitem, "d", 1), ("f", abs, "d"))
    assert selecting_nodes(n["e"], {n["c"]}) == {n["d"], n["e"]}
    assert selecting_nodes(n["c"], {n["c"]}) == set()
    assert selecting_nodes(n["f"], {n["c"]}) is None


def convolution(mask):
    graph, n = graph_of(
        ("conv", aten.convolution_backward.default, "a", "b", mask),
        *((f"g{i}", operator.getitem, "conv", i) for i in range(3)),
    )
    return graph, n


def test_fused_backward_is_divided_by_its_mask():
    graph, n = convolution([True, True, True])
    split_masked(graph, {n["conv"], n["g0"]})
    twin = n["g1"].args[0]
    assert twin is not n["conv"]
    assert n["g2"].args == (twin, 2)
    assert n["g0"].args == (n["conv"], 0)
    assert n["conv"].args[-1] == [True, False, False]
    assert twin.args[-1] == [False, True, True]


def test_fused_backward_for_one_side_alone_is_not_divided():
    for wanted in (set(), {"conv", "g0", "g1", "g2"}):
        graph, n = convolution([True, True, True])
        split_masked(graph, {n[name] for name in wanted})
        assert targets(graph).count(aten.convolution_backward.default) == 1
    graph, n = convolution([True, False, False])
    split_masked(graph, {n["conv"], n["g0"]})
    assert n["conv"].args[-1] == [True, False, False]
    assert targets(graph).count(aten.convolution_backward.default) == 1


def test_dropout_multiplies_the_mask_by_its_scale_as_eager_does():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.25))
    assert aten.native_dropout_backward.default not in targets(joint_of(model, torch.ones(2, 3)).graph)
    joint = joint_of(model, torch.ones(2, 3), as_on_cpu=False)
    (node,) = joint.graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default)
    gradient, mask, scale = node.args
    value = node.meta["val"]
    readers = set(node.users)
    dropout_as_eager(joint.graph)
    (product,) = (n for n in gradient.users if n.target is aten.mul.Tensor)
    assert set(product.users) == readers
    (scaled,) = (n for n in product.args if n is not gradient)
    assert (scaled.target, scaled.args[1]) == (aten.div.Scalar, 0.75)
    assert scaled.args[0].args == (mask,)
    assert scaled.args[0].kwargs == {"dtype": torch.float32}
    assert product.meta["val"].stride() == value.stride()
    assert aten.native_dropout_backward.default not in targets(joint.graph)
    assert scale == pytest.approx(4 / 3)


@torch.library.custom_op("panpipe_tests::without_derivative", mutates_args=())
def without_derivative(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


without_derivative.register_fake(torch.empty_like)


DERIVATIVES = {"known": True}


def derivative(ctx, gradient):
    if not DERIVATIVES["known"]:
        raise ValueError("no such derivative")
    return gradient


without_derivative.register_autograd(derivative)


@pytest.mark.filterwarnings("ignore:Error detected")
def test_operator_without_a_derivative_is_refused(monkeypatch):
    def step(model, batch):
        return without_derivative(model(batch)).mean()

    model, batch = nn.Linear(3, 3), torch.ones(2, 3)
    (stage,) = stages(operators(model, step, batch))
    monkeypatch.setitem(DERIVATIVES, "known", False)
    with pytest.raises(RequestError, match="backward programs: ValueError: no such derivative; use another"):
        trace_joint(stage)
