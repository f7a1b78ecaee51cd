"""Operators of small steps: what is grouped, what each stage computes itself, and the graph of them."""

import pytest
import torch
from panpipe.core.capture.export.operators import Operators, computes, operators_of, tensor_bytes
from panpipe.core.capture.export.step import capture_step
from panpipe.core.costs.graph import OpEdge
from panpipe.core.errors import RequestError
from torch import nn

X = torch.zeros(2, 4)


class Net(nn.Module):
    """A layer without bias, a table, and a counter."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))


def operators(step, model=None, **options) -> Operators:
    return operators_of(capture_step(model or Net(), step, X), **options)


def test_bytes_of_a_tensor():
    assert tensor_bytes(torch.zeros(2, 3, dtype=torch.float64)) == 48
    assert tensor_bytes(torch.zeros(3, 0)) == 0
    assert tensor_bytes(7) == 0


def test_chain_is_an_operator_for_each_call_with_its_module():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    found = operators(lambda model, x: model(x).square().mean(), model)
    assert found.members == {
        "0/linear": ("linear",),
        "1/tanh": ("tanh",),
        "2/linear": ("linear_1",),
        "/square": ("square",),
        "/mean": ("mean",),
    }
    assert [(node.name, node.parameter_bytes, node.state_bytes, node.parameters) for node in found.graph.nodes[:3]] == [
        ("0/linear", 60, 240, ("0.weight", "0.bias")),
        ("1/tanh", 0, 0, ()),
        ("2/linear", 32, 128, ("2.weight", "2.bias")),
    ]
    assert found.graph.edges == (
        OpEdge("0/linear", "1/tanh", 24),
        OpEdge("1/tanh", "2/linear", 24),
        OpEdge("2/linear", "/square", 16),
        OpEdge("/square", "/mean", 16),
    )
    assert (found.local, found.fixed, found.first_draw) == (frozenset(), frozenset(), {})
    assert found.owner["linear_1"] == "2/linear"
    assert found.nodes["tanh"].name == "tanh"


def test_second_operator_of_a_name_has_an_ordinal_and_a_shared_parameter_counts_once():
    found = operators(lambda model, x: model.a(model.a(x)).mean())
    assert list(found.members) == ["a/linear", "a/linear.2", "/mean"]
    assert [(node.parameter_bytes, node.state_bytes) for node in found.graph.nodes] == [(64, 256), (0, 0), (0, 0)]
    assert found.graph.nodes[1].parameters == ("a.weight",)


def test_what_depends_on_constants_and_buffers_alone_is_local_to_each_stage():
    found = operators(lambda model, x: (model.a(x) + torch.arange(4.0) * model.table).mean())
    assert found.local == {"arange", "mul"}
    assert list(found.members) == ["a/linear", "/add", "/mean"]


def test_what_depends_on_parameters_alone_is_fixed():
    found = operators(lambda model, x: (model.a(x) * model.a.weight.exp().sum()).mean())
    assert found.fixed == {"exp", "sum_1"}


def test_nodes_that_draw_have_ordinals_and_are_never_local():
    def step(model, x):
        noise = torch.rand(4)
        return nn.functional.dropout(model.a(x) + noise, 0.5).mean()

    found = operators(step)
    assert found.first_draw == {"rand": 0, "dropout": 1}
    assert found.local == frozenset()


def test_views_and_parts_belong_to_what_they_show():
    def step(model, x):
        one, other = model.a(x).chunk(2)
        return (one * other).mean()

    found = operators(step).members
    assert found == {"a/linear": ("linear", "chunk", "getitem", "getitem_1"), "/mul": ("mul",), "/mean": ("mean",)}
    found = operators(step, apart=("chunk",)).members
    assert (found["a/linear"], found["/chunk"]) == (("linear",), ("chunk", "getitem", "getitem_1"))


def test_reader_of_a_transposed_tensor_belongs_to_the_operator_before_it():
    def step(model, x):
        return model.a(x).t().exp().sin().mean()

    found = operators(step).members
    assert found["a/linear"] == ("linear", "t", "exp", "sin", "mean")
    named = operators(step, apart=("exp",)).members
    assert named["a/linear"] == ("linear", "t")
    assert named["/exp"][0] == "exp"


def test_write_in_place_belongs_to_what_computed_the_tensor_and_both_results_are_edges():
    def step(model, x):
        h = model.a(x)
        g = h * 2
        h.add_(1)
        return (h + g).mean()

    found = operators(step)
    assert found.members == {"a/linear": ("linear", "mul", "add_"), "/add": ("add",), "/mean": ("mean",)}
    assert found.graph.edges == (
        OpEdge("a/linear", "/add", 32, tensor=1),
        OpEdge("a/linear", "/add", 32, tensor=2),
        OpEdge("/add", "/mean", 32),
    )


def test_write_of_a_buffer_is_one_operator_with_all_readers():
    def step(model, x):
        early = model.a(x) + model.seen
        late = early.sin()
        model.seen.add_(1)
        return late.mean()

    found = operators(step)
    assert found.members["/add"] == ("add", "sin", "add_")
    assert found.local == frozenset()


def test_edge_without_a_gradient_is_marked():
    def step(model, x):
        h = model.a(x)
        return (h * (h > 0)).mean()

    edges = {(edge.src, edge.dst): edge.gradient for edge in operators(step).graph.edges}
    assert edges["a/linear", "/gt"] is True
    assert edges["/gt", "/mul"] is False


def test_views_compute_nothing():
    found = operators(lambda model, x: model.a(x).t().mean())
    assert [name for name in ("linear", "t", "mean") if computes(found.nodes[name])] == ["linear", "mean"]


def test_loss_without_a_trained_parameter_is_refused():
    model = Net().requires_grad_(False)
    with pytest.raises(RequestError, match="the loss does not depend on any parameter that requires a gradient"):
        operators(lambda model, x: model.a(x).mean(), model)
