"""Masked scatters and what they become: the same values and gradients, to the last bit."""

import pytest
import torch
from panpipe.core.capture.graph.rewrites import rewrite_masked_scatters
from torch import fx

aten = torch.ops.aten


def graph_of(shape):
    graph = fx.Graph()
    values, mask, source = (graph.placeholder(name) for name in ("values", "mask", "source"))
    node = graph.call_function(aten.masked_scatter.default, (values, mask, source))
    node.meta = {"val": torch.empty(shape), "stack_trace": "here"}
    graph.output(node)
    return graph


@pytest.mark.parametrize("mask_shape", [(3, 4), (4,), (3, 1)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_choice_has_the_values_and_gradients_of_the_scatter(mask_shape, share):
    generator = torch.Generator().manual_seed(0)
    values, source = (torch.randn(3, 4, generator=generator, requires_grad=True) for _ in range(2))
    mask = torch.rand(mask_shape, generator=generator) < share
    graph = graph_of((3, 4))
    rewrite_masked_scatters(graph)
    graph.lint()
    assert not any(node.target is aten.masked_scatter.default for node in graph.nodes)
    weights = torch.randn(3, 4, generator=generator)
    found = []
    for result in (
        values.masked_scatter(mask, source),
        fx.Interpreter(fx.GraphModule({}, graph)).run(values, mask, source),
    ):
        found.append((result, *torch.autograd.grad((result * weights).sum(), (values, source))))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_new_operators_come_from_the_same_line_and_the_result_keeps_its_value():
    graph = graph_of((3, 4))
    rewrite_masked_scatters(graph)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert {node.meta["stack_trace"] for node in calls} == {"here"}
    assert [node for node in calls if "val" in node.meta] == calls[-1:]
    assert calls[-1].target is aten.where.self
