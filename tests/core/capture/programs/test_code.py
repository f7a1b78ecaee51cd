"""Programs compute what their nodes compute, whatever they overwrite and whatever they hand over as factors."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.capture.programs.code import compile_program, no_sink
from panpipe.core.capture.programs.fusing import Fusions
from panpipe.core.capture.programs.overwriting import overwriting
from panpipe.core.capture.programs.products import products_of
from torch import Tensor, fx

aten = torch.ops.aten
SIDE = 4
UNARY = [aten.t.default, aten.neg.default, aten.clone.default, aten.alias.default, aten.relu.default]
BINARY = [aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.mm.default, aten.gelu_backward.default]


class Taken:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.products = 0

    def add(self, number: int, value: Any) -> None:
        self.values[number] = value.clone()

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        self.values[number] = left.mm(right)
        self.products += 1


def node(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    made = graph.call_function(target, args)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    made.meta["val"] = target(*values)
    return made


def placeholder(graph: fx.Graph, name: str, dtype: torch.dtype = torch.float64) -> fx.Node:
    made = graph.placeholder(name)
    made.meta["val"] = torch.randn(SIDE, SIDE, dtype=dtype)
    return made


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


@settings(max_examples=400, deadline=None)
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


def test_sum_overwrites_its_most_recent_operand() -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x"), placeholder(graph, "y")
    one = node(graph, aten.mm.default, x, y)
    other = node(graph, aten.mm.default, y, x)
    total = node(graph, aten.add.Tensor, one, other)
    assert overwriting([one, other, total], {total}) == {total: (aten.add.out, "out", other)}


@pytest.mark.parametrize("reason", ["an input", "read later", "a view is read later", "kept", "a view is kept", "both"])
def test_value_that_is_still_needed_is_not_overwritten(reason: str) -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x"), placeholder(graph, "y")
    made = x if reason == "an input" else node(graph, aten.mm.default, x, y)
    view = node(graph, aten.t.default, made)
    total = node(graph, aten.add.Tensor, made, view if reason == "both" else y)
    nodes = [one for one in (made, view, total) if one is not x]
    kept: set[fx.Node] = {total}
    if reason == "read later":
        nodes.append(node(graph, aten.relu.default, made))
    elif reason == "a view is read later":
        nodes.append(node(graph, aten.relu.default, view))
    elif reason == "kept":
        kept.add(made)
    elif reason == "a view is kept":
        kept.add(view)
    assert not overwriting(nodes, kept)


def test_an_operand_of_another_layout_is_not_overwritten() -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x"), placeholder(graph, "y")
    product = node(graph, aten.mm.default, x, y)
    turned = node(graph, aten.t.default, product)
    assert not overwriting([product, turned, node(graph, aten.add.Tensor, turned, y)], set())
    row = node(graph, aten.mm.default, x, y)
    row.meta["val"] = torch.empty(1, SIDE, dtype=torch.float64)
    assert not overwriting([row, node(graph, aten.add.Tensor, row, y)], set())


@pytest.mark.parametrize("flips", [0, 1, 2, 3])
def test_gradient_that_is_a_product_is_passed_as_its_factors(flips: int) -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x"), placeholder(graph, "y")
    nodes = [node(graph, aten.mm.default, x, y)]
    for _ in range(flips):
        nodes.append(node(graph, aten.t.default, nodes[-1]))
    sink = Taken()
    compile_program(nodes, [x, y], [], {}, [nodes[-1]])([x.meta["val"], y.meta["val"]], sink)
    assert sink.products == 1
    torch.testing.assert_close(sink.values[0], nodes[-1].meta["val"], rtol=1e-12, atol=1e-12)


def test_a_product_that_is_read_elsewhere_is_computed() -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x"), placeholder(graph, "y")
    product = node(graph, aten.mm.default, x, y)
    gradient = node(graph, aten.t.default, product)
    norm = node(graph, aten.relu.default, product)
    assert not products_of([gradient], [product, gradient, norm], [])
    assert not products_of([gradient], [product, gradient], [product])
    assert not products_of([gradient, gradient], [product, gradient], [])
    assert not products_of([gradient], [gradient], [])
    assert len(products_of([gradient], [product, gradient], [])) == 1
    half = node(graph, aten.mm.default, *(placeholder(graph, name, torch.bfloat16) for name in ("a", "b")))
    assert not products_of([half], [half], [])
    compile_program([product, gradient, norm], [x, y], [norm], {}, [gradient])([x.meta["val"], y.meta["val"]], no_sink)
