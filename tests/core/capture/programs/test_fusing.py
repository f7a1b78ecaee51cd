"""Groups of neighbouring operators: what they take in, what they read and make, and in what order programs run."""

import operator

import torch
from panpipe.core.capture.programs.fusing import Fusion, fused, running_order
from panpipe.core.capture.programs.overwriting import overwriting
from torch import fx

aten = torch.ops.aten
SIDE = 4


def call(graph: fx.Graph, target, *args) -> fx.Node:
    made = graph.create_node("call_function", target, args, name=getattr(target, "_opname", "getitem"))
    made.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    return made


def read(graph: fx.Graph, name: str, *shape: int) -> fx.Node:
    made = graph.placeholder(name)
    made.meta["val"] = torch.randn(shape or (SIDE, SIDE))
    return made


def shape_of(pieces) -> list[list[str] | str]:
    return [[n.name for n in p.nodes] if isinstance(p, Fusion) else p.name for p in pieces]


def test_groups_end_at_products_and_an_independent_sum_joins_the_earlier_group():
    graph = fx.Graph()
    x, w = read(graph, "x"), read(graph, "w")
    total = call(graph, aten.add.Tensor, x, x)
    active = call(graph, aten.relu.default, total)
    product = call(graph, aten.mm.default, active, w)
    columns = call(graph, aten.sum.dim_IntList, total, [0])  # waits for no product
    other = call(graph, aten.mm.default, x, w)  # waits for nothing
    late = call(graph, aten.neg.default, product)
    later = call(graph, aten.mul.Tensor, late, columns)
    nodes = [total, active, product, columns, other, late, later]
    pieces = fused(nodes, {later, other})
    assert shape_of(pieces) == ["mm_1", ["add", "relu", "sum_1"], "mm", ["neg", "mul"]]
    first, second = (piece for piece in pieces if isinstance(piece, Fusion))
    assert (first.inputs, first.outputs) == ((x,), (active, columns))
    assert (second.inputs, second.outputs) == ((product, columns), (later,))


def test_views_read_by_other_groups_are_computed_outside():
    graph = fx.Graph()
    x, w = read(graph, "x"), read(graph, "w")
    turned = call(graph, aten.t.default, x)
    total = call(graph, aten.add.Tensor, turned, w)
    active = call(graph, aten.relu.default, total)
    flat = call(graph, aten.t.default, active)
    product = call(graph, aten.mm.default, flat, w)
    pieces = fused([turned, total, active, flat, product], {product})
    assert shape_of(pieces) == [["t", "add", "relu"], "t_1", "mm"]
    assert pieces[0].inputs == (x, w)
    assert pieces[0].outputs == (active,)
    both = fused([turned, total, active, flat, product], {product, turned})
    assert shape_of(both) == ["t", ["t", "add", "relu"], "t_1", "mm"], "one is returned: it is computed outside, too"


def test_operator_with_several_results_is_grouped_with_its_getitems():
    graph = fx.Graph()
    x, w = read(graph, "x"), read(graph, "w", SIDE)
    total = call(graph, aten.add.Tensor, x, x)
    norm = call(graph, aten.native_layer_norm.default, total, [SIDE], w, w, 1e-5)
    result, mean = (call(graph, operator.getitem, norm, i) for i in (0, 1))
    pieces = fused([total, norm, result, mean], {result, mean, total})
    assert shape_of(pieces) == [["add", "native_layer_norm", "getitem", "getitem_1"]]
    assert pieces[0].outputs == (total, result, mean)
    assert not isinstance(fused([norm, result, mean], {result, mean})[0], Fusion), "one alone is a kernel already"


def test_random_draws_products_and_complex_numbers_are_not_grouped():
    graph = fx.Graph()
    x = read(graph, "x")
    whole = graph.placeholder("z")
    whole.meta["val"] = torch.randn(SIDE, SIDE, dtype=torch.complex64)
    nodes = [
        call(graph, aten.bernoulli.p, x, 0.5),
        call(graph, aten.add.Tensor, whole, whole),
        call(graph, aten.neg.default, whole),
        call(graph, aten.mm.default, x, x),
    ]
    assert fused(nodes, set(nodes)) == nodes


def test_value_read_by_a_later_group_is_not_overwritten():
    graph = fx.Graph()
    x, w = read(graph, "x"), read(graph, "w")
    made = call(graph, aten.mm.default, x, w)
    turned = call(graph, aten.t.default, made)
    added = call(graph, aten.add.Tensor, made, x)  # could go where the product is, but for the group after it
    apart = call(graph, aten.mm.default, added, w)
    first = call(graph, aten.mul.Tensor, turned, apart)
    second = call(graph, aten.neg.default, first)
    nodes = [made, turned, added, apart, first, second]
    pieces = fused(nodes, {second})
    assert shape_of(pieces) == ["mm", "add", "mm_1", ["t", "mul", "neg"]]
    order = running_order(nodes, pieces)
    assert [node.name for node in order] == ["mm", "add", "mm_1", "t", "mul", "neg"]
    assert overwriting(order, {second}, set(nodes).difference(pieces)) == {}
