"""Programs compute what their nodes compute, whatever they overwrite and whatever they pass on as factors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.capture.programs.fusing import Fusions
from panpipe.core.capture.programs.generated_code import Program, compile_program, no_sink
from panpipe.core.errors import described
from torch import Tensor, fx

from ....support.nodes import Taken, node, placeholder

aten = torch.ops.aten
UNARY = [aten.t.default, aten.neg.default, aten.clone.default, aten.alias.default, aten.relu.default]
BINARY = [aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.mm.default, aten.gelu_backward.default]


def values_of(nodes: list[fx.Node], inputs: list[fx.Node]) -> dict[fx.Node, Tensor]:
    found = {one: one.meta["val"].clone() for one in inputs}
    for one in nodes:
        found[one] = one.target(*(found[a] if isinstance(a, fx.Node) else a for a in one.args)).clone()
    return found


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Inputs, nodes, what is returned and what is handed over, of any small program of matrices."""
    torch.manual_seed(draw(st.integers(0, 100)))
    graph = fx.Graph()
    inputs = [placeholder(graph, f"x{i}") for i in range(draw(st.integers(1, 3)))]
    known, nodes = list(inputs), list[fx.Node]()
    for _ in range(draw(st.integers(1, 14))):
        recent = st.sampled_from(known[-4:] + inputs)
        if draw(st.integers(0, 2)):
            made = node(graph, draw(st.sampled_from(BINARY)), draw(recent), draw(recent))
        else:
            made = node(graph, draw(st.sampled_from(UNARY)), draw(recent))
        nodes.append(made)
        known.append(made)
    returned = draw(st.lists(st.sampled_from(known), max_size=3))
    for_sink = draw(st.lists(st.sampled_from(known), max_size=4))
    return inputs, nodes, returned, for_sink


def called(module: fx.GraphModule, given: list[Tensor]) -> Any:
    return module.forward(*given)


@settings(max_examples=200, deadline=None)
@given(programs(), st.sampled_from([None, Fusions]))
def test_a_program_computes_its_nodes(
    made: tuple[list[fx.Node], list[fx.Node], list[fx.Node], list[fx.Node]], divide: Callable[[], Fusions] | None
) -> None:
    inputs, nodes, returned, for_sink = made
    fusions = None if divide is None else divide()
    expected = values_of(nodes, inputs)
    given_values = [one.meta["val"].clone() for one in inputs]
    kept = [value.clone() for value in given_values]
    sink = Taken()
    program = compile_program(nodes, inputs, returned, {}, for_sink, fusions)
    if fusions is not None:
        fusions.bind(lambda fusion: partial(called, fx.GraphModule({}, fusion.graph())))
    results = program(list(given_values), sink)
    for result, one in zip(results, returned, strict=True):
        assert torch.equal(result, expected[one])
    assert sorted(sink.values) == list(range(len(for_sink)))
    for number, one in enumerate(for_sink):
        torch.testing.assert_close(sink.values[number], expected[one], rtol=1e-12, atol=1e-12)
    for value, before in zip(given_values, kept, strict=True):
        assert torch.equal(value, before), "a program changes nothing that it is given"


def failing_program(stack_trace: str) -> Program:
    """A program whose second operator fails, if its inputs have different shapes."""
    graph = fx.Graph()
    x, y = (placeholder(graph, name) for name in ("x", "y"))
    nodes = [node(graph, aten.neg.default, x), node(graph, aten.add.Tensor, x, y)]
    nodes[1].meta["stack_trace"] = stack_trace
    return compile_program(nodes, [x, y], [nodes[1]], {})


def test_error_of_an_operator_is_noted_with_the_line_that_it_was_captured_from() -> None:
    program = failing_program('File "/home/me/train.py", line 8, in step\n    return x + y')
    with pytest.raises(RuntimeError, match="must match the size") as failure:
        program([torch.ones(2), torch.ones(3)], Taken())
    assert failure.value.__notes__ == ["at /home/me/train.py:8"]
    assert described(failure.value).endswith("(at /home/me/train.py:8)")


def test_error_of_an_operator_without_a_known_line_has_no_note() -> None:
    with pytest.raises(RuntimeError) as failure:
        failing_program("")([torch.ones(2), torch.ones(3)], Taken())
    assert not hasattr(failure.value, "__notes__")


def test_views_of_all_of_a_tensor_are_left_out():
    graph = fx.Graph()
    x = placeholder(graph, "x")
    whole = node(graph, aten.view.default, x, [4, 4])
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
