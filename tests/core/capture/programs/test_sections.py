"""Sections of programs: where they begin, what they read, return and add up, and that equal layers are equal."""

import operator
from functools import partial

import pytest
import torch
from panpipe.core.capture.graph.randomness import DRAWS_AT, bernoulli, random_key
from panpipe.core.capture.programs.fusing import Fusion, Fusions, Shown
from panpipe.core.capture.programs.generated_code import compile_program, no_sink
from panpipe.core.capture.programs.sections import divided
from panpipe.runtimes.programs.stage_compiler import signature
from torch import fx

from ....support.nodes import SIDE, Taken, node, placeholder

aten = torch.ops.aten


def layer(graph: fx.Graph, x: fx.Node, weight: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """A product, an activation and a residual sum."""
    nodes = [node(graph, aten.mm.default, x, weight)]
    nodes.append(node(graph, aten.tanh.default, nodes[-1]))
    nodes.append(node(graph, aten.mm.default, nodes[-1], weight))
    nodes.append(node(graph, aten.add.Tensor, nodes[-1], x))
    return nodes[-1], nodes


def stack(count: int) -> tuple[list[fx.Node], list[fx.Node]]:
    graph = fx.Graph()
    inputs, nodes = [placeholder(graph, "x")], list[fx.Node]()
    x = inputs[0]
    for number in range(count):
        inputs.append(placeholder(graph, f"w{number}"))
        x, own = layer(graph, x, inputs[-1])
        nodes += own
    return inputs, nodes


def sections_of(pieces) -> list[Fusion]:
    return [piece for piece in pieces if isinstance(piece, Fusion)]


def called(module, given):
    return module.forward(*given)


def bind(fusions: Fusions) -> None:
    fusions.bind(lambda fusion: partial(called, fx.GraphModule({}, fusion.graph())))


def test_layers_are_sections_and_equal_ones_have_equal_graphs():
    inputs, nodes = stack(5)
    pieces = divided(nodes, {nodes[-1]})
    found = sections_of(pieces)
    assert pieces == found
    assert [len(each.nodes) for each in found] == [4] * 4 + [4]
    assert [each.outputs for each in found] == [(nodes[i],) for i in range(3, 20, 4)]
    assert set(found[1].inputs) == {nodes[3], inputs[2]}
    assert len({signature(each.graph()) for each in found}) == 1


def test_a_program_without_repetitions_is_one_section():
    _, nodes = stack(1)
    (section,) = divided(nodes, {nodes[-1], nodes[1]})
    assert section.nodes == tuple(nodes)
    assert section.outputs == (nodes[1], nodes[3])


def test_views_of_results_are_shown_outside_and_views_of_earlier_results_inside():
    graph = fx.Graph()
    x, w = placeholder(graph, "x"), placeholder(graph, "w")
    product = node(graph, aten.mm.default, x, w)
    halves = node(graph, aten.split.Tensor, product, 2, 1)
    halves.meta["val"] = list(halves.meta["val"])
    half = node(graph, operator.getitem, halves, 1)
    turned = node(graph, aten.t.default, half)
    active = node(graph, aten.tanh.default, turned)
    section, shown = divided([product, halves, half, turned, active], {turned, active})
    assert set(section.outputs) == {product, active}
    assert isinstance(shown, Shown)
    assert (shown.node, shown.root) == (turned, product)
    fusions = Fusions()
    program = compile_program([product, halves, half, turned, active], [x, w], [turned, active], {}, fusions=fusions)
    bind(fusions)
    view, result = program([x.meta["val"], w.meta["val"]], no_sink)
    assert torch.equal(view, turned.meta["val"])
    assert view.stride() == turned.meta["val"].stride()
    assert torch.equal(result, active.meta["val"])


def test_a_section_adds_gradients_to_their_sums_and_products_in_one_operator():
    graph = fx.Graph()
    x, g = placeholder(graph, "x"), placeholder(graph, "g")
    back = node(graph, aten.tanh.default, g)
    rows = node(graph, aten.t.default, back)
    product = node(graph, aten.mm.default, rows, x)
    gradient = node(graph, aten.t.default, product)
    scaled = node(graph, aten.mul.Tensor, back, back)
    nodes = [back, rows, product, gradient, scaled]
    (section,) = divided(nodes, set(), [gradient, scaled])
    assert section.numbers == (0, 1)
    targets = [each.target for each in section.graph().nodes if each.op == "call_function"]
    assert aten.addmm_.default in targets
    assert aten.mm.default not in targets
    fusions, sink = Fusions(), Taken()
    program = compile_program(nodes, [x, g], [], {}, [gradient, scaled], fusions)
    bind(fusions)
    program([x.meta["val"], g.meta["val"]], sink)
    assert sink.sections == 1
    for number, value in enumerate((gradient, scaled)):
        torch.testing.assert_close(sink.values[number], value.meta["val"], rtol=1e-12, atol=1e-12)


def test_what_no_compiler_takes_runs_between_sections():
    graph = fx.Graph()
    x = placeholder(graph, "x")
    first = [node(graph, aten.neg.default, x)]
    first.append(node(graph, aten.tanh.default, first[0]))
    whole = node(graph, aten.complex.default, first[1], x)
    last = [node(graph, aten.real.default, whole)]
    last.append(node(graph, aten.neg.default, last[0]))
    last.append(node(graph, aten.tanh.default, last[1]))
    pieces = divided([*first, whole, *last], {last[-1]})
    assert [isinstance(piece, Fusion) for piece in pieces] == [True, False, False, True]
    assert pieces[1:3] == [whole, last[0]]


def test_an_operator_and_its_results_are_in_one_section():
    graph = fx.Graph()
    x, nodes = placeholder(graph, "x"), list[fx.Node]()
    for _ in range(3):
        norm = node(graph, aten.native_layer_norm.default, x, [SIDE], None, None, 1e-5)
        nodes.append(norm)
        picked = [node(graph, operator.getitem, norm, i) for i in (0, 1)]
        x = node(graph, aten.tanh.default, picked[0])
        nodes += [picked[0], x, node(graph, aten.neg.default, x), picked[1]]
    kept = {each for each in nodes if each.target is operator.getitem or each.target is aten.neg.default}
    for piece in sections_of(divided(nodes, kept)):
        inside = set(piece.nodes)
        assert all(each.args[0] in inside for each in piece.nodes if each.target is operator.getitem)


def test_layers_that_differ_in_the_ordinals_of_their_draws_are_equal():
    graph = fx.Graph()
    x, key = placeholder(graph, "x"), graph.placeholder("key")
    key.meta["val"] = random_key(1, 2, 3)
    start, nodes = x, list[fx.Node]()
    for number in range(3):
        mask = node(graph, bernoulli, x, 0.5, key, number)
        nodes += [mask, node(graph, aten.mul.Tensor, x, mask)]
        nodes.append(node(graph, aten.tanh.default, nodes[-1]))
        nodes.append(node(graph, aten.add.Tensor, nodes[-1], x))
        x = nodes[-1]
    found = sections_of(divided(nodes, {x}))
    assert len(found) == 3
    assert len({signature(each.graph()) for each in found}) == 1
    fusions = Fusions()
    program = compile_program(nodes, [start, key], [x], {}, fusions=fusions)
    bind(fusions)
    (result,) = program([start.meta["val"], key.meta["val"]], no_sink)
    assert torch.equal(result, x.meta["val"])


@pytest.mark.parametrize("draw", DRAWS_AT, ids=lambda draw: draw.name())
def test_a_draw_with_its_ordinal_in_a_tensor_has_the_arguments_of_the_draw(draw):
    names = [argument.name for argument in draw._schema.arguments]
    assert [argument.name for argument in DRAWS_AT[draw]._schema.arguments] == names
    assert names[-2:] == ["key", "ordinal"]


def test_a_section_does_not_change_with_the_graph_of_its_program():
    _, nodes = stack(1)
    (section,) = divided(nodes, {nodes[-1]})
    alone = section.detached()
    before = signature(alone.graph())
    nodes[1].args = (nodes[0].args[0],)
    assert signature(alone.graph()) == before
    assert signature(section.graph()) != before
