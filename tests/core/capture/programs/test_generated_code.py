"""Programs compute what their nodes compute, whatever they overwrite and whatever they hand over as factors."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.capture.programs.fusing import Fusions
from panpipe.core.capture.programs.generated_code import compile_program
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
    handed_over = draw(st.lists(st.sampled_from(known), max_size=4))
    return inputs, nodes, returned, handed_over


@settings(max_examples=200, deadline=None)
@given(programs(), st.booleans())
def test_a_program_computes_its_nodes(
    made: tuple[list[fx.Node], list[fx.Node], list[fx.Node], list[fx.Node]], grouped: bool
) -> None:
    inputs, nodes, returned, handed_over = made
    fusions = Fusions() if grouped else None
    expected = values_of(nodes, inputs)
    given_values = [one.meta["val"].clone() for one in inputs]
    kept = [value.clone() for value in given_values]
    sink = Taken()
    program = compile_program(nodes, inputs, returned, {}, handed_over, fusions)
    if fusions is not None:
        fusions.bind(lambda fusion: fx.GraphModule({}, fusion.graph()).forward)
    results = program(list(given_values), sink)
    for result, one in zip(results, returned, strict=True):
        assert torch.equal(result, expected[one])
    assert sorted(sink.values) == list(range(len(handed_over)))
    for number, one in enumerate(handed_over):
        torch.testing.assert_close(sink.values[number], expected[one], rtol=1e-12, atol=1e-12)
    for value, before in zip(given_values, kept, strict=True):
        assert torch.equal(value, before), "a program changes nothing that it is given"
