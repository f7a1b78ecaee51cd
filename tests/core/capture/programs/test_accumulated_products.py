"""Gradients that are matrix products: passed as factors where nothing else reads them."""

import pytest
import torch
from panpipe.core.capture.programs import accumulated_products
from panpipe.core.capture.programs.accumulated_products import products_of
from panpipe.core.capture.programs.generated_code import compile_program, no_sink
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


def test_factors_of_16_bits_are_accumulated_in_float32_where_a_device_has_the_kernel(monkeypatch) -> None:
    """The kernel is CUDA's alone: here a double of `accumulates_in_float32` replaces such a device."""
    graph = fx.Graph()
    x, y = (placeholder(graph, name, torch.bfloat16) for name in ("x", "y"))
    product = node(graph, aten.mm.default, x, y)
    flipped = node(graph, aten.t.default, product)
    cast = node(graph, aten._to_copy.default, flipped, dtype=torch.float32)
    nodes = [product, flipped, cast]
    assert not products_of([cast], nodes, [])  # on a CPU
    monkeypatch.setattr(accumulated_products, "accumulates_in_float32", lambda device, dtype: True)
    (found,) = products_of([cast], nodes, [])
    assert found.node is product
    assert found.transposed
    half = node(graph, aten._to_copy.default, flipped, dtype=torch.float64)
    assert not products_of([half], [product, flipped, half], [])


def test_accumulate_product_calls_the_kernel_of_the_factors_dtype(monkeypatch) -> None:
    """For 16 bits CUDA's kernel, replaced by one that computes the same on a CPU."""
    calls = []

    class Kernels:
        class addmm:
            @staticmethod
            def dtype_out(total, left, right, dtype, *, out):
                calls.append(dtype)
                return out.copy_(total + left.to(dtype) @ right.to(dtype))

        class mm:
            @staticmethod
            def dtype_out(left, right, dtype, *, out):
                calls.append(dtype)
                return out.copy_(left.to(dtype) @ right.to(dtype))

    monkeypatch.setattr(accumulated_products, "aten", Kernels)
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    for dtype in (torch.float32, torch.bfloat16):
        factors = left.to(dtype), right.to(dtype)
        total = accumulated_products.first_product(torch.empty(3, 5), *factors)
        accumulated_products.accumulate_product(total, *factors)
        torch.testing.assert_close(total, 2 * (factors[0].float() @ factors[1].float()))
    assert calls == [torch.float32] * 2


def test_a_cpu_does_not_accumulate_factors_of_16_bits_in_float32() -> None:
    assert not accumulated_products.accumulates_in_float32(torch.device("cpu"), torch.bfloat16)
