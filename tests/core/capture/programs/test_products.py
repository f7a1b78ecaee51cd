"""Gradients that are matrix products: passed as factors where nothing else reads them."""

import pytest
import torch
from panpipe.core.capture.programs.code import compile_program, no_sink
from panpipe.core.capture.programs.products import products_of
from torch import fx

from ....support.nodes import Taken, node, placeholder

aten = torch.ops.aten


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


@pytest.mark.parametrize(("flips", "transposed"), [(0, False), (1, True), (2, False)])
def test_product_knows_its_transpositions(flips: int, transposed: bool) -> None:
    graph = fx.Graph()
    nodes = [node(graph, aten.mm.default, placeholder(graph, "x"), placeholder(graph, "y"))]
    for _ in range(flips):
        nodes.append(node(graph, aten.t.default, nodes[-1]))
    (found,) = products_of([nodes[-1]], nodes, [])
    assert (found.number, found.node, len(found.flips), found.transposed) == (0, nodes[0], flips, transposed)
